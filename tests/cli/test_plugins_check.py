"""`graftlm plugins check` runs a family's conformance kit on any provider."""

import subprocess
import sys
from pathlib import Path

import pytest

from graftlm.cli import main
from graftlm.registry import FAMILIES
from graftlm.testing import SchedulingPolicyConformance
from graftlm.testing.tiny_models import write_tiny_checkpoint

#: In contrast to `python -m`, the installed script does not have the current folder on its path.
SCRIPT = [sys.executable, "-P", "-c", "from graftlm.cli import main; main()"]

PLUGIN = """
from graftlm import Options, Provider, hookimpl
from graftlm.contracts import EvictionStrategy, SchedulingPolicy

class WeightOptions(Options):
    weight: float = 1.0
    is_pure: bool = True

class Weighed(EvictionStrategy):
    def __init__(self, options):
        self.options = options
        self.calls = 0

    def priority(self, node):
        self.calls += not self.options.is_pure
        return (node.last_access * self.options.weight, self.calls)

class Losing(SchedulingPolicy):
    max_wait_s = 1.0

    def order(self, waiting, now):
        return list(waiting)[:1]

class Bias:
    pass

def needs_cuda(platform):
    return None if platform.device == "cuda" else "needs a CUDA device"

def provider(name, create, **fields):
    return Provider(name=name, summary="x", api_version=1, create=create, **fields)

@hookimpl
def provide_eviction_strategies():
    return [
        provider("weighed", lambda options, context: Weighed(options), options=WeightOptions),
        provider("nothing", lambda options, context: None),
        provider("fancy", lambda options, context: None, unavailable=needs_cuda),
    ]

@hookimpl
def provide_scheduling_policies():
    return [provider("losing", lambda options, context: Losing())]

@hookimpl
def provide_logits_processors():
    return [provider("bias", lambda options, context: Bias())]
"""


CHOICES_ONLY = """
from dataclasses import replace
from graftlm import hookimpl
from graftlm.contracts import GrammarKind
from graftlm.errors import GrammarError
import graftlm_grammar

(inner,) = (provider for provider in graftlm_grammar.provide_grammar_backends() if provider.name == "xgrammar")

def create(options, context):
    backend = inner.create(options, context)
    check, compile = backend.check, backend.compile

    def only(spec):
        if spec.kind is not GrammarKind.CHOICE:
            raise GrammarError("only choices")
        return spec

    backend.check = lambda spec: check(only(spec))
    backend.compile = lambda spec: compile(only(spec))
    return backend

@hookimpl
def provide_grammar_backends():
    return [replace(inner, name="choices", create=create)]
"""


FORGETFUL = """
from dataclasses import replace
from graftlm import hookimpl
import graftlm_cache

(inner,) = (provider for provider in graftlm_cache.provide_prefix_caches() if provider.name == "radix")

def create(options, context):
    cache = inner.create(options, context)
    evict = cache.evict
    cache.evict = lambda num_pages: evict(max(num_pages - 1, 0))  # so often wrong that few histories are all right
    return cache

@hookimpl
def provide_prefix_caches():
    return [replace(inner, name="forgetful", create=create)]
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("check_plugin.py").write_text(PLUGIN)
    yield
    sys.modules.pop("check_plugin", None)


@pytest.fixture
def check(capsys):
    """Run `graftlm plugins check`; return (exit status, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(("plugins", "check", *arguments))
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return run


@pytest.mark.parametrize(
    "which", ["eviction/lru", "scheduling/fcfs", "scheduling/lpm", pytest.param("cache/chunk", marks=pytest.mark.full)]
)
def test_a_built_in_plugin_keeps_its_contract(check, which):
    """A cache is checked below, where one with a fault fails."""
    status, out, err = check(which)
    assert (status, err) == (0, "")
    assert " 0 failed" in out.splitlines()[-1]


def sentences() -> list[str]:
    """The sentences that the kit of policies checks, in order."""
    tests = [test for name, test in vars(SchedulingPolicyConformance).items() if name.startswith("test_")]
    return [" ".join(test.__doc__.split()) for test in tests]


def test_a_name_in_only_one_family_needs_no_family(check):
    status, out, err = check("fcfs")
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == check("scheduling/fcfs")[1].splitlines()[-1]


def test_a_name_in_several_families_needs_the_family(check):
    status, out, err = check("priority")
    assert (status, out) == (2, "")
    assert err == "error: 'priority' is in several families: eviction, scheduling. Give FAMILY/priority.\n"


def test_a_grammar_backend_is_checked_with_the_cases_that_it_supports(check):
    Path("choices_only.py").write_text(CHOICES_ONLY)
    status, out, err = check("grammar/choices", "--module", "choices_only")
    assert (status, err) == (0, "")
    assert out.splitlines()[-1].endswith(" passed, 0 failed, 0 skipped")


def test_every_sentence_is_printed_with_its_outcome(check):
    status, out, _ = check("scheduling/fcfs")
    assert status == 0
    assert [line[8:] for line in out.splitlines() if line.startswith(("passed  ", "skipped "))] == sentences()
    assert out.splitlines()[-1].endswith(" skipped")


def test_a_faulty_plugin_fails_with_the_reason(check):
    status, out, err = check("scheduling/losing", "--module", "check_plugin")
    lines = out.splitlines()
    assert (status, err) == (1, "")
    assert lines[:3] == [
        "failed  `order` returns a permutation of the waiting requests.",
        "        in 6 of 10 cases, first test_order_is_a_permutation[2-0]:",
        "          AssertionError: order() returned 1 of 2 requests",
    ]
    assert lines[3].startswith("          at ")
    assert "scheduling.py:" in lines[3]
    assert lines[-1] == f"{len(sentences()) - 1} passed, 1 failed, 0 skipped"


def test_a_failing_random_history_is_printed_from_its_start(check):
    Path("forgetful.py").write_text(FORGETFUL)
    status, out, _ = check("cache/forgetful", "--module", "forgetful")
    lines = out.splitlines()
    assert status == 1
    assert "ExceptionGroup" not in out
    assert not [line for line in lines if line.strip() == "AssertionError:"]
    start = lines.index("failed  After each step of random histories, the cache agrees with a plain dictionary.")
    assert 0 < sum(line.strip().startswith("state.") for line in lines[start:]) <= 40


@pytest.mark.parametrize(("is_pure", "status"), [("true", 0), ("false", 1)])
def test_options_are_passed_to_the_plugin(check, is_pure, status):
    arguments = ("eviction/weighed", "--module", "check_plugin", "--options", "weight=2", "--options")
    assert check(*arguments, f"is_pure={is_pure}")[0] == status


def test_a_plugin_that_creates_another_type_fails_every_sentence(check):
    status, out, _ = check("eviction/nothing", "--module", "check_plugin")
    assert status == 1
    assert "must create an instance of graftlm.contracts.EvictionStrategy, got builtins.NoneType" in out
    assert out.splitlines()[-1].startswith("0 passed")


def test_a_sentence_that_cannot_be_tested_is_skipped_with_the_reason(check, tmp_path):
    status, out, _ = check("storage/file", "--options", f"path={tmp_path / 'kv'}", "--options", "max_bytes=64MiB")
    lines = out.splitlines()
    assert status == 0
    reason = lines.index("skipped The size limit holds after every `put`, and the stored blocks are intact.") + 1
    assert lines[reason] == "        the kit cannot set a size limit: it does not override create_limited()"
    assert lines[-1] == "12 passed, 0 failed, 5 skipped"


def test_a_model_is_checked_with_a_checkpoint(check, tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "tiny", "llama", vocab_size=128, num_layers=1)
    status, out, _ = check("model/llama", "--checkpoint", str(folder))
    assert (status, out.splitlines()[-1].split(",")[1]) == (0, " 0 failed")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("eviction/lruu",), "Unknown eviction strategy 'lruu'. Available: "),
        (("eviction/lruu",), "Did you mean 'lru'?"),
        (("evictoin/lru",), f"families are: {', '.join(FAMILIES)}. Did you mean 'eviction/lru'?"),
        (("lruu",), "'lruu' is not a valid FAMILY/NAME"),
        (("eviction/",), "Did you mean 'eviction/NAME'?"),
        (("eviction/fancy", "--module", "check_plugin", "--device", "cpu"), "cannot run here: needs a CUDA device"),
        (("model/llama",), "needs a checkpoint of model 'llama' (architectures: LlamaForCausalLM"),
        (
            ("model/llama", "--checkpoint", "nowhere"),
            "nowhere is not the folder of a checkpoint: it has no",
        ),
        (("eviction/weighed", "--module", "check_plugin", "--options", "wieght=2"), "cache.eviction.options.wieght"),
        (("eviction/weighed", "--module", "check_plugin", "--options", "weight"), "expected KEY=VALUE"),
        (("eviction/weighed", "--module", "check_plugin", "--options", "weight=[1"), "is not valid YAML"),
        (
            ("eviction/weighed", "--module", "check_plugin", "--options", "a=1", "--options", "a.b=1"),
            "sets a key in 'a', but another option set it to a value",
        ),
        (("storage/file",), "storage.file.path: "),
        (("scheduling/fcfs", "--module", "no_such_module_here"), "no_such_module_here"),
    ],
)
def test_a_plugin_that_cannot_be_checked_is_reported_with_the_reason(check, arguments, said):
    status, out, err = check(*arguments)
    assert (status, out) == (2, "")
    assert said in err


def test_options_before_the_sub_command_are_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        main(("plugins", "--device", "cpu", "check", "eviction/lru"))
    assert caught.value.code == 2
    assert "after its name" in capsys.readouterr().err


def test_kits_refuse_to_run_without_assertions():
    program = "from graftlm.cli import main; main(['plugins', 'check', 'scheduling/fcfs'])"
    done = subprocess.run([sys.executable, "-O", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, "python -O" in done.stderr) == (2, True)


def test_pytest_is_not_needed():
    program = (
        "import sys\n"
        "sys.modules['pytest'] = sys.modules['hypothesis'] = None\n"
        "from graftlm.cli import main; main(['plugins', 'check', 'eviction/lru'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "        needs the package hypothesis, which is not installed" in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        (["plugins", "check", "eviction/weighed", "--module", "beside"], "."),
        (["config", "check", "settings/engine.yaml"], ".."),
    ],
)
def test_a_module_is_found_beside_the_configuration_and_in_the_current_folder(tmp_path, words, folder):
    home = tmp_path / "settings"
    home.mkdir()
    (home / "beside.py").write_text(PLUGIN)
    (home / "yaml.py").write_text("raise SystemExit('a file here hides an installed module')")
    (home / "engine.yaml").write_text("plugins: {modules: [beside]}\ncache: {eviction: weighed}\n")
    done = subprocess.run([*SCRIPT, *words], cwd=home / folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr + done.stdout
