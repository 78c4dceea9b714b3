"""`ondevice bench` and llama-bench on one file: the page gets both commands, and what they print."""

from pathlib import Path
from types import SimpleNamespace

from benchmarks.publish import beside


def test_the_page_has_both_commands_and_what_they_print(monkeypatch, tmp_path):
    ran = []

    def run(*words):
        ran.append([str(word) for word in words])
        return SimpleNamespace(stdout=f"\n| {len(ran)} |\n")

    page = tmp_path / "page.md"
    page.write_text("a\n<!-- measured -->\nold\n<!-- /measured -->\nb\n")
    monkeypatch.setattr(beside, "PAGES", [page])
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
