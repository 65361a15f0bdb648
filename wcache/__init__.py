# SPDX-License-Identifier: Apache-2.0
"""wcache keeps a model's sharded, post-processed weights resident outside the engine that uses them."""

__version__ = "0.1.0"
