# SPDX-License-Identifier: Apache-2.0
"""vLLM's side of wcache: `--load-format wcache`, and the preload of `loader = "vllm"`. Imported only inside vLLM."""
