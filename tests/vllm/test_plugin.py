# SPDX-License-Identifier: Apache-2.0
"""The entry point that vLLM calls in each of its processes."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any


def test_the_installed_package_offers_the_plugin_to_vllm() -> None:
    [found] = [e for e in entry_points(group="vllm.general_plugins") if e.name == "wcache"]
    assert found.value == "wcache.engine.vllm.plugin:register"


def test_registering_twice_is_registering_once_and_a_name_that_is_taken_is_left_alone(child: Any) -> None:
    code = """
from vllm.model_executor import model_loader
from wcache.engine.vllm.plugin import register
register(); register()
known = model_loader._LOAD_FORMAT_TO_MODEL_LOADER
ours = known["wcache"].__module__
class Other: pass
known["wcache"] = Other
child.log.lines.clear()
register()
result = [ours, known.pop("wcache") is Other, [l for l in child.log.lines if "is taken by" in l]]
register()
"""
    ours, left_alone, said = child("evaluate", code=code)
    assert (ours, left_alone, len(said)) == ("wcache.engine.vllm.loader", True, 1)


def test_a_vllm_that_lacks_what_we_need_still_starts(child: Any) -> None:
    code = """
import vllm.model_executor.model_loader as m
from wcache.engine.vllm.plugin import register
taken, function = m._LOAD_FORMAT_TO_MODEL_LOADER.pop("wcache"), m.register_model_loader
child.log.lines.clear()
del m.register_model_loader
register()
result = [l for l in child.log.lines if "could not register" in l]
m._LOAD_FORMAT_TO_MODEL_LOADER["wcache"], m.register_model_loader = taken, function
"""
    assert len(child("evaluate", code=code)) == 1


def test_an_unknown_option_ends_the_start_with_the_nearest_name(child: Any) -> None:
    code = """
from vllm.config.load import LoadConfig
from vllm.plugins import load_general_plugins
from vllm.model_executor.model_loader import get_model_loader
load_general_plugins()
try:
    get_model_loader(LoadConfig(load_format="wcache", model_loader_extra_config={"falback": False}))
except Exception as e:
    result = str(e)
"""
    assert "did you mean fallback?" in child("evaluate", code=code)


def test_the_private_flags_that_keep_cpu_weights_unpacked_exist_in_this_vllm(child: Any) -> None:
    """They are private to vLLM: a version without them must be noticed here, not by a user."""
    code = """
import vllm._custom_ops as ops
from vllm.model_executor.layers import utils
from wcache.engine.vllm.disk import unpacked_linear
before = (ops._supports_onednn, utils.check_cpu_sgl_kernel)
with unpacked_linear():
    inside = (ops._supports_onednn, utils.check_cpu_sgl_kernel(1024, 1024, None))
after = (ops._supports_onednn, utils.check_cpu_sgl_kernel)
import inspect
source = inspect.getsource(utils.dispatch_cpu_unquantized_gemm)
result = [inside, before == after, "ops._supports_onednn" in source, "check_cpu_sgl_kernel(" in source]
"""
    assert child("evaluate", code=code) == [[False, False], True, True, True]
