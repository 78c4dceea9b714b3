"""`ondevice bench` and llama-bench on one file: the page gets both commands, and what they print."""

from pathlib import Path
from types import SimpleNamespace

from benchmarks.publish import beside
from ondevice import machine


def test_the_page_has_both_commands_and_what_they_print(monkeypatch, tmp_path):
    ran = []

    def run(*words):
        ran.append([str(word) for word in words])
        return SimpleNamespace(stdout=f"\n| {len(ran)} |\n")

    page, every = tmp_path / "page.md", tmp_path / "every.md"
    page.write_text("a\n<!-- measured -->\nold\n<!-- /measured -->\nb\n")
    other = f"{beside.BEGIN}file.gguf, on another processor:\n\n```\n1\n```\n"
    own = f"{beside.BEGIN}file.gguf, on {machine.processor_name()}, some system:\n\n```\n2\n```\n"
    every.write_text(f"<!-- measured -->\n{own}\n{other}<!-- /measured -->\n")
    monkeypatch.setattr(beside, "EXAMPLE", page)
    monkeypatch.setattr(beside, "EVERY", every)
    monkeypatch.setattr(beside, "fetch", lambda name, progress: tmp_path / "file.gguf")
    monkeypatch.setattr(beside, "export", lambda source, out: out)
    monkeypatch.setattr(beside, "run_program", run)
    beside.publish(Path("/programs/llama-bench"), 2, ["--repack", "0"])
    tests = " ".join(beside.TESTS)
    assert [words[2:4] for words in ran[:2]] == [["ondevice", "prepare"], ["ondevice", "bench"]]
    assert ran[2][:3] == ["/programs/llama-bench", "-m", str(tmp_path / "file.gguf")]
    before, _, shown = page.read_text().partition("```\n")
    assert before.startswith("a\n<!-- measured -->\nBoth on one published file, file.gguf, on ")
    assert f"```\n{shown}" == (
        f"```\n$ ondevice bench bundles/smollm2 {tests} --drafters none --threads 2\n| 2 |\n```\n\n"
        f"```\n$ llama-bench -m file.gguf {tests} -t 2 --repack 0\n| 3 |\n```\n"
        "<!-- /measured -->\nb\n"
    )
    new = page.read_text().partition("measured -->\n")[2].partition("<!--")[0]
    assert every.read_text() == f"<!-- measured -->\n{other}\n{new}<!-- /measured -->\n"
