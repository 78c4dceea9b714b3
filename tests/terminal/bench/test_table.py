from ondevice.decoding.record import Round, Stats
from ondevice.terminal.bench.configuration import PLAIN, Configuration, combine
from ondevice.terminal.bench.row import Row, rows_of
from ondevice.terminal.bench.runner import Run
from ondevice.terminal.bench.table import markdown

MTP = Configuration("mtp", "4")

TABLE = """\
| drafter | draft | prefill tok/s | decode tok/s | first ms | tokens/round | acceptance by position | k=0 | RSS MB | speed-up | equal |
| ------- | ----- | ------------: | -----------: | -------: | -----------: | ---------------------- | --: | -----: | -------: | ----: |
| plain   |       |           100 |         10.0 |      200 |         1.00 |                        |     |      5 |    1.00x |   2/2 |
| mtp     | 4     |           100 |         20.0 |      200 |         2.00 | 1.00 .50               | 50% |      5 |    2.00x |   1/2 |"""  # noqa: E501


def run_of(rounds, token_ids=(1, 2, 3, 4, 5), first_token_s=0.2):
    stats = Stats(prompt_tokens=20, new_tokens=1, prefill_s=0.2, peak_rss_bytes=5_000_000, drafter="mtp")
    for this in rounds:
        stats.add(this)
    return Run(tuple(token_ids), first_token_s, stats)


def plain_run():
    return run_of([Round((1,), seconds=0.1)] * 4)


def mtp_run(**options):
    return run_of([Round((1, 2, 3), drafted=2, accepted=2, depth=2, seconds=0.1), Round((4,), seconds=0.1)], **options)


def other_run():
    wrong = [Round((1, 2), drafted=2, accepted=1, depth=2, seconds=0.1), Round((3, 4), drafted=0, seconds=0.1)]
    return run_of(wrong, token_ids=(1, 2, 3, 9, 9))


def test_the_whole_table():
    results = [{MTP: mtp_run(), PLAIN: plain_run()}, {PLAIN: plain_run(), MTP: other_run()}]
    assert markdown(rows_of(results)) == TABLE


def test_sums_weigh_long_replies_more():
    long, short = run_of([Round((1,), seconds=0.1)] * 9), run_of([Round((1,), seconds=1.0)])
    assert Row.of(PLAIN, [long, short], [long, short]).decode_tokens_per_s == 10 / 1.9


def test_the_first_token_is_a_median():
    runs = [mtp_run(first_token_s=seconds) for seconds in (0.1, 0.2, 9.0)]
    assert Row.of(MTP, runs, runs).first_token_ms == 200


def test_a_reply_of_one_token_divides_by_nothing():
    runs = [run_of([])]
    row = Row.of(PLAIN, runs, runs)
    assert (row.decode_tokens_per_s, row.tokens_per_round, row.speed_up) == (0, 0, 0)


def test_long_drafts_are_cut_short():
    run = run_of([Round(tuple(range(9)), drafted=8, accepted=8, depth=8, seconds=0.1)])
    [line] = markdown([Row.of(MTP, [run], [run])]).splitlines()[2:]
    assert "1.00 1.00 1.00 1.00 1.00 1.00 ... |" in line


def test_configurations():
    chosen = combine(["mtp", "ngram"], ["2", "auto"])
    assert chosen[0] == PLAIN
    pairs = [(configuration.drafter, configuration.length) for configuration in chosen[1:]]
    assert pairs == [("mtp", "2"), ("mtp", "auto"), ("ngram", "2"), ("ngram", "auto")]
    assert Configuration("mtp", "heuristic").options() == {
        "drafter": "mtp",
        "num_assistant_tokens_schedule": "heuristic",
    }
