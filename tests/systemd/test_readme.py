# SPDX-License-Identifier: Apache-2.0
"""The README's way from install to the first hit, run as it stands."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from private_systemd import REPO, WCACHE, Manager

pytestmark = pytest.mark.systemd


def test_the_readme_leads_to_a_hit(group: Manager, llama: Path) -> None:
    group.run("rm", group.config)
    block = re.search(r"<!-- first hit.*?```sh\n(.*?)```", (REPO / "README.md").read_text(), re.DOTALL)
    assert block is not None
    script = re.sub(r"^MODEL=.*$", f"MODEL={llama}", block[1], flags=re.MULTILINE)
    path = f"{WCACHE.parent}:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    done = group.run("env", f"PATH={path}", "bash", "-euxc", f"cd {REPO}\n{script}")
    assert "1 of 1 rank ready" in done.stdout
    assert re.search(r"Mapped \d+ tensors from the weight cache daemon \(zero_copy mode\)", done.stderr)
