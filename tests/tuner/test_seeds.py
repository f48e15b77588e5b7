"""What wins elsewhere and is tried first."""

import dataclasses

from replayssm_tune.runtime.plan import Plan, Structure, Tile, Variant
from replayssm_tune.tuner.seeds import seeds
from tests.tuner import samples

BOTH = Structure("both")


def row(batch, tile, **spec):
    return dataclasses.replace(
        samples.measured_row(batch),
        spec=dataclasses.replace(samples.SPEC, **spec),
        plan=Plan((Variant(BOTH, tile),)),
        module_digests=("a" * 16,),
        binaries=((samples.binary("3.6.0", 90),),),
    )


def test_the_nearest_batch_comes_first_then_the_nearest_spec():
    far, near, wide, half, akin, other = (Tile(p, 128, 128) for p in (8, 16, 128, 256, 32, 64))
    rows = (
        row(4096, far),
        row(100, near, state_dtype="bf16"),
        row(128, wide, ring_dtype="fp32"),
        row(128, half, ring_dtype="fp32", activation_dtype="fp16"),
        row(128, akin, heads_per_group=8),
        row(130, other, head_dim=80),
    )
    found = seeds(samples.SPEC, 128, rows)
    assert [v.tile for v in found] == [akin, other, wide, half, near, far]


def test_static_rows_and_other_ops_are_no_evidence():
    static = dataclasses.replace(samples.static_row(128))
    assert seeds(samples.SPEC, 128, (static,)) == ()
    assert seeds(samples.SPEC.native, 128, (samples.measured_row(128),)) == ()


def test_both_kernels_of_a_pair_count():
    assert seeds(samples.SPEC, 128, (samples.measured_row(128),)) == samples.TWO_LAUNCHES.variants
