"""`ondevice` itself: help, mistakes in one line, exit codes, closed streams, missing packages."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ondevice import __version__
from ondevice.cli.main import COMMANDS, main
from ondevice.errors import OndeviceError

HEAVY = {"numba", "onnxruntime", "torch", "transformers", "tokenizers", "jinja2", "matplotlib", "onnx", "tqdm"}
HEAVY |= {"starlette", "uvicorn", "asyncio"}


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["generate", "--help"], ["bench", "--help"], ["info", "-h"], ["serve", "-h"]]
)
def test_help_imports_nothing_heavy(words):
    code = f"""
import sys
from ondevice.cli.main import main
try:
    main({words})
except SystemExit as ended:
    assert ended.code == 0, ended.code
heavy = {HEAVY | {"ondevice_export"}} & set(sys.modules)
assert not heavy, heavy
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("code", "most"),
    [
        pytest.param("import ondevice", 60, id="import"),
        pytest.param(
            "from ondevice.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass", 120, id="help"
        ),
    ],
)
def test_few_modules_are_imported(code, most):
    """Modules that a bare interpreter has not. On Python 3.11 it is 38 and 66: a few dozen milliseconds."""
    code = f"import sys\nbefore = set(sys.modules)\n{code}\nprint(*sorted(set(sys.modules) - before))"
    ended = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    imported = ended.stdout.splitlines()[-1].split()
    assert "numpy" not in imported
    assert len(imported) <= most, imported


@pytest.mark.parametrize("command", ["", *(name for name in COMMANDS if name != "export")])
def test_help_begins_with_examples(capsys, command):
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("examples:\n  ondevice")


@pytest.mark.parametrize(
    ("command", "default"),
    [
        ("generate", "256; with --chat, and what implies it, until the context is full"),
        ("run", "in a chat 4096; one answer: until the context is full, with --ids 256"),
        ("chat", "4096"),
        ("batch", "256"),
    ],
)
def test_help_says_how_long_a_reply_may_be(capsys, command, default):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert f"maximum number of tokens to generate (default: {default})" in " ".join(capsys.readouterr().out.split())


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"ondevice {__version__}\n"


def test_no_command_is_a_mistake_with_a_short_help(run):
    code, out, err = run()
    assert (code, out) == (2, "")
    assert "commands:" in err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["sing"], "unknown command 'sing'. Try `ondevice --help`"),
        (["generate"], "required: BUNDLE. Try `ondevice generate --help`"),
        (["batch"], "required: BUNDLE, PROMPTS, --out. Try `ondevice batch --help`"),
        (["generate", "b", "p", "--top-k", "x"], "--top-k: invalid int value: 'x'. Try"),
        (["generate", "b", "p", "--temper", "1"], "unknown option --temper: did you mean --temp? Try"),
        (["genrate", "b"], "unknown command 'genrate': did you mean generate? Try"),
        (["generate", "b", "p", "--temprature=1"], "unknown option --temprature: did you mean --temperature? Try"),
        (
            ["generate", "Why is the sky blue?"],
            "'Why is the sky blue?' is not a bundle, and there is no prompt: the bundle",
        ),
        (["generate", "b", "p", "--top-logprobs", "2"], "--top-logprobs needs --json or --json-lines"),
        (
            ["generate", "b", "p", "--drafter", "magic"],
            "'magic' is none of auto, mtp, ngram, ",
        ),
        (["info", "nowhere"], "no bundle at nowhere"),
        (["bench", "b", "--lengths", "1,none"], "'none' is neither a number"),
        (["bench", "b", "--drafters", ","], "the list is empty"),
    ],
)
def test_a_mistake_is_one_line(run, words, complaint):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.startswith("ondevice: ")
    assert complaint in err
    assert err.count("\n") == 1


def test_debug_raises_the_error(run):
    with pytest.raises(OndeviceError):
        run("info", "nowhere", "--debug")


def test_a_failing_disk_is_one_line(run, bundle, monkeypatch):
    def fail(*words, **options):
        raise PermissionError(13, "Permission denied", "bundle.json")

    monkeypatch.setattr("ondevice.cli.info.Bundle.open", fail)
    assert run("info", bundle) == (2, "", "ondevice: bundle.json: permission denied\n")


def test_a_character_that_the_console_lacks_is_replaced(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    monkeypatch.setattr("ondevice.machine.processor_name", lambda: "pröcessor")
    assert main(["info"]) == 0
    sys.stdout.flush()
    assert b"pr?cessor" in written.getvalue()


@pytest.mark.parametrize("command", COMMANDS)
def test_docs_commands_md_names_every_option(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = (Path(__file__).parents[2] / "docs" / "commands.md").read_text("utf-8")
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert [option for option in sorted(options) if f"`{option}" not in text] == []


def test_missing_packages_are_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "ondevice_export.command", None)
    code, _, err = run("export", "source")
    assert code == 2
    assert "pip install 'ondevice-runtime[export]'" in err


def _written_to(descriptor, words):
    """Exit code and errors of a command whose standard output is this file, buffered as it is by default."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "ondevice", *words]
    ended = subprocess.run(command, stdout=descriptor, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    # the first run compiles the kernels of the measurement
    return ended.returncode, [line for line in ended.stderr.splitlines() if "compiling kernels" not in line]


@pytest.mark.parametrize("words", [["info"], ["--help"], ["completion", "bash"]])
def test_a_broken_pipe_prints_no_error(words):
    reading, writing = os.pipe()
    os.close(reading)
    assert _written_to(writing, words) == (141, [])
    os.close(writing)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["info"], ["--version"], ["run", "--help"]])
def test_output_that_cannot_be_written_is_one_line(words, monkeypatch, unbuffered):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with Path("/dev/full").open("wb") as full:
        assert _written_to(full, words) == (2, ["ondevice: no space left on device"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_diagnostics_that_cannot_be_written_end_no_command(reference_bundle, monkeypatch, unbuffered):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    words = [sys.executable, "-m", "ondevice", "generate", str(reference_bundle), "x", "-n", "2"]
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(words, stdout=subprocess.PIPE, stderr=full, check=False)
        refused = subprocess.run([*words[:3], "info", "nowhere"], stderr=full, check=False)
    assert ended.returncode == 0
    assert ended.stdout
    assert refused.returncode == 2


@pytest.mark.skipif(os.name == "nt", reason="the shell of Windows cannot close a stream")
def test_generate_works_with_a_closed_standard_output(reference_bundle):
    words = f'exec "{sys.executable}" -m ondevice generate "{reference_bundle}" x --max-new-tokens 2 >&-'
    ended = subprocess.run(words, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 0
    assert "2 tokens, " in ended.stderr


@pytest.mark.skipif(os.name == "nt", reason="the shell of Windows cannot close a stream")
@pytest.mark.parametrize("command", ["generate {} -", "chat {}"])
def test_a_closed_standard_input_is_a_mistake(bundle, command):
    words = f"exec '{sys.executable}' -m ondevice {command.format(bundle)} <&-"
    ended = subprocess.run(words, shell=True, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "ondevice: standard input is closed: give the text another way\n"


@pytest.mark.skipif(os.name == "nt", reason="the shell of Windows cannot close a stream")
def test_errors_do_not_go_to_standard_output_if_stderr_is_closed():
    words = f"exec '{sys.executable}' -m ondevice info nowhere 2>&-"
    ended = subprocess.run(words, shell=True, stdout=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")


@pytest.mark.skipif(os.name == "nt", reason="the shell of Windows cannot close a stream")
def test_a_file_opened_later_does_not_get_the_number_of_a_closed_stream(tmp_path):
    code = f"""
import os
from ondevice.cli.main import main
main(["info", "nowhere"])
file = open({str(tmp_path / "file")!r}, "w")
os._exit(file.fileno())
"""
    words = f"exec '{sys.executable}' -c '{code.replace(chr(39), chr(34))}' <&- >&- 2>&-"
    assert subprocess.run(words, shell=True, check=False).returncode > 2


@pytest.mark.parametrize(
    "words", [["info", "~nosuchuser/b"], ["export", "~nosuchuser/b"], ["export", "x", "--out", "~nosuchuser/b"]]
)
def test_a_home_directory_that_does_not_exist(run, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    code, out, err = run(*words, *(["--drafter", "none"] if words[0] == "export" else []))
    assert (code, out) == (2, "")
    assert "~nosuchuser/b: there is no home directory of this name" in err
    assert err.count("\n") == 1


def test_a_cache_in_a_home_directory_that_does_not_exist(run, monkeypatch):
    monkeypatch.setenv("ONDEVICE_CACHE", "~nosuchuser/cache")
    code, out, err = run("info")
    assert (code, out) == (2, "")
    assert err.startswith("ondevice: ONDEVICE_CACHE is ~nosuchuser/cache: there is no home directory of this name")


def test_too_little_memory_is_one_line(run, bundle, monkeypatch):
    def fail(*words, **options):
        raise MemoryError("Unable to allocate 3.00 TiB")

    monkeypatch.setattr("ondevice.cli.info.Bundle.open", fail)
    code, out, err = run("info", bundle)
    assert (code, out) == (2, "")
    assert err == "ondevice: Unable to allocate 3.00 TiB: close other programs, or try a smaller --context-length\n"


@pytest.mark.parametrize("words", [["generate", "x"], ["bench"]])
def test_without_onnxruntime(reference_bundle, tmp_path, words):
    """A module that cannot be imported replaces it."""
    (tmp_path / "onnxruntime.py").write_text('raise ModuleNotFoundError("No module", name="onnxruntime")')
    command = [sys.executable, "-m", "ondevice", words[0], str(reference_bundle), *words[1:], "--engine", "ort"]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), root, f"{root}/export"])}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "ondevice: the ort engine needs onnxruntime: pip install onnxruntime, or use --engine simd\n"


def test_an_error_with_line_breaks_and_control_characters_is_one_line(run):
    code, _, err = run("info", "no\nwhere\x1b[31m")
    assert code == 2
    assert err.startswith("ondevice: no bundle at no where [31m: ")
    assert err.count("\n") == 1


def test_a_real_command_line_ends_with_the_exit_code():
    words = [sys.executable, "-m", "ondevice", "info", "nowhere"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("ondevice: no bundle at nowhere")
