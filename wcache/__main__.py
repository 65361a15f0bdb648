# SPDX-License-Identifier: Apache-2.0
"""`python -m wcache` is the console script `wcache`."""

from wcache.cli.main import main

main()
