"""vLLM's replay functions over the ops of this package, by their names and contracts.

``docs/compat.md`` says in a table for each how its contract maps to the ops, what is left out, and where the
functions come from.
"""

from .vllm_gdn import fused_recurrent_gated_delta_rule_replayssm
from .vllm_mamba2 import (
    selective_state_update_replayssm_output_only,
    selective_state_update_replayssm_state_and_output,
)

__all__ = [
    "fused_recurrent_gated_delta_rule_replayssm",
    "selective_state_update_replayssm_output_only",
    "selective_state_update_replayssm_state_and_output",
]
