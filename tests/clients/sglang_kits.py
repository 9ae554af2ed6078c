"""Runs server tests of SGLang's wheel against `graftlm serve` with the bundled model.

    python tests/clients/sglang_kits.py --python build/clients/sglang/bin/python

The wheel has these tests as mixins, which send requests to a URL. They are loaded without SGLang itself.
"""

import argparse
import contextlib
import importlib.util
import io
import subprocess
import sys
import types
import unittest
from pathlib import Path
from typing import Any, Final

import openai

from graftlm.testing.server_process import ServerProcess

#: File -> its mixin.
KITS: Final = {
    "abort_timeout_kit": "AbortAllMixin",
    "anthropic_messages_kit": "AnthropicMessagesMixin",
    "basic_api_contract_kit": "BasicAPIContractMixin",
    "basic_decode_correctness_kit": "BasicDecodeCorrectnessMixin",
    "basic_scheduler_stress_kit": "BasicSchedulerStressMixin",
    "ebnf_constrained_kit": "EBNFConstrainedMixin",
    "json_constrained_kit": "JSONConstrainedMixin",
    "json_mode_kit": "JSONModeMixin",
    "matched_stop_kit": "MatchedStopMixin",
    "pause_generation_kit": "PauseResumeInPlaceMixin",
    "regex_constrained_kit": "RegexConstrainedMixin",
}
#: Shorter than in the wheel, as the bundled model has a context of 2,048 tokens.
LENGTHS: Final = {"abort_all_max_new_tokens": 2000, "abort_all_num_requests": 8}
#: Tests that do not apply -> the reason.
LEFT_OUT: Final[dict[str, str]] = {
    "test_tool_result_image_content_conversion": "tests a function of SGLang, not a server",
    "test_finish_stop_regex_str": "has an expression with $, which depends on the text after a match and is refused",
    "test_finish_stop_eos": "has the end-of-sequence tokens of other models",
    "test_finish_stop_str": "needs a model that writes a long story",
    "test_basic_math": "needs a larger model's knowledge",
    "test_capital_france": "needs a larger model's knowledge",
    "test_color_completion": "needs a larger model's knowledge",
    "test_streaming_response": "needs a larger model's knowledge",
    "test_long_prompt": "its prompt is longer than the bundled model's context",
    "test_regex_generate_custom_log_format": "needs a model that ends a free text before the limit",
}


def load(folder: Path, name: str) -> Any:
    """Import a file of the wheel. Modules of SGLang that it imports are replaced by empty ones."""
    for module in ("protocol", "serving"):
        empty = types.ModuleType(f"sglang.srt.entrypoints.anthropic.{module}")
        empty.AnthropicMessagesRequest = empty.AnthropicServing = None  # type: ignore[attr-defined]
        sys.modules[empty.__name__] = empty
    for module in ("sglang", "sglang.srt", "sglang.srt.entrypoints", "sglang.srt.entrypoints.anthropic"):
        sys.modules.setdefault(module, types.ModuleType(module))
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module_of_kit = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module_of_kit)
    return module_of_kit


def suite(folder: Path, url: str, process: Any, names: list[str]) -> unittest.TestSuite:
    """Return the tests of all kits for a server."""
    tests = unittest.TestSuite()
    fields: dict[str, Any] = {
        "base_url": url,
        "process": process,
        "model": "demo",
        "api_key": "none",
        "served_model_name": "demo",
    }
    fields["client"] = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    fields |= LENGTHS
    for name in names:
        kit = type(name, (getattr(load(folder, name), KITS[name]), unittest.TestCase), fields)
        for test in unittest.defaultTestLoader.loadTestsFromTestCase(kit):
            if test.id().rpartition(".")[2] not in LEFT_OUT:
                tests.addTest(test)
    return tests


def main() -> None:
    """Run the kits; exits with 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="Python of an environment with sglang")
    parser.add_argument("names", nargs="*", default=list(KITS), help="files of the wheel; default: all")
    options = parser.parse_args()
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(subprocess.check_output([options.python, "-c", where], text=True).strip())
    folder = packages / "sglang" / "test" / "kits"
    with ServerProcess({"model": "demo"}, timeout_s=600) as server:
        tests = suite(folder, server.url, server.process, options.names)
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            result = unittest.TextTestRunner(output, verbosity=2).run(tests)
    succeeded = result.testsRun > 0 and result.wasSuccessful()
    if not succeeded:
        print(output.getvalue())
    print(
        f"  {'ok    ' if succeeded else 'FAILED'} {result.testsRun} server tests of the wheel; {len(LEFT_OUT)} left out"
    )
    sys.exit(not succeeded)


if __name__ == "__main__":
    main()
