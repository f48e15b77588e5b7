"""vLLM's replay functions over the ops of this package, by their names and contracts.

``docs/compat.md`` says in a table for each how its contract maps to the ops, what is left out, and where the
functions come from.
"""

from .vllm_cursors import (
    commit_gdn_replayssm_spec,
    commit_replayssm_spec,
    reset_gdn_replayssm_spec_cursors,
    reset_replayssm_spec_cursors,
)
from .vllm_gdn import fused_recurrent_gated_delta_rule_replayssm, gdn_replayssm_spec_decode
from .vllm_mamba2 import (
    selective_state_update_replayssm_output_only,
    selective_state_update_replayssm_spec,
    selective_state_update_replayssm_state_and_output,
)

__all__ = [
    "commit_gdn_replayssm_spec",
    "commit_replayssm_spec",
    "fused_recurrent_gated_delta_rule_replayssm",
    "gdn_replayssm_spec_decode",
    "reset_gdn_replayssm_spec_cursors",
    "reset_replayssm_spec_cursors",
    "selective_state_update_replayssm_output_only",
    "selective_state_update_replayssm_spec",
    "selective_state_update_replayssm_state_and_output",
]
