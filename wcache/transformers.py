# SPDX-License-Identifier: Apache-2.0
"""Transformers models from a rank's resident weights.

import wcache.transformers
model = wcache.transformers.from_pretrained("/models/x", auto_class="AutoModelForCausalLM", dtype="bfloat16")
"""

from __future__ import annotations

from wcache.engine.transformers.load import attachment, from_pretrained

__all__ = ["attachment", "from_pretrained"]
