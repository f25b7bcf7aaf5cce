"""The report: a sequence of records that prints as a table."""

import pickle

from torch import nn

import tk
from tk.dropin import Record, Report


def test_records() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.GELU()))
    report = tk.use(model)
    assert list(report) == [
        Record("0", "Linear", "linear", True, ""),
        Record("1", "ReLU", None, False, "calls nothing by its name that tk has"),
        Record("2.0", "GELU", "gelu", True, ""),
    ]
    assert [r.path for r in report.replaced] == ["0", "2.0"] and [r.path for r in report.left] == ["1"]
    assert str(report) == repr(report)
    assert str(report).splitlines() == [
        "module  type    op      replaced  reason",
        "------  ------  ------  --------  -------------------------------------",
        "     0  Linear  linear  yes",
        "     1  ReLU    -       no        calls nothing by its name that tk has",
        "   2.0  GELU    gelu    yes",
    ]


def test_the_model_itself() -> None:
    assert str(tk.use(nn.Linear(4, 4))).splitlines()[2].split() == ["(model)", "Linear", "linear", "yes"]


def test_slices_undo_the_whole_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    part = tk.use(model)[:1]
    assert isinstance(part, Report) and len(part) == 1
    part.undo()
    assert not any("forward" in vars(m) for m in model)


def test_pickled_it_holds_no_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    report = tk.use(model)
    loaded = pickle.loads(pickle.dumps(report))
    assert list(loaded) == list(report)
    loaded.undo()
    assert "forward" in vars(model[0])


def test_an_empty_report_prints_its_header() -> None:
    assert str(tk.use(nn.Sequential())).splitlines()[0].split() == ["module", "type", "op", "replaced", "reason"]


def test_undone_it_says_so() -> None:
    report = tk.use(nn.Sequential(nn.Linear(4, 4)))
    assert "undone" not in str(report)
    report.undo()
    assert str(report).splitlines()[0] == "undone: the model is as it was before"
    assert str(report[:1]).startswith("undone")


def test_undone_no_row_says_that_it_is_replaced() -> None:
    report = tk.use(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    report.undo()
    for shown in (report, report[:1], report.replaced, pickle.loads(pickle.dumps(report))):
        assert str(shown).splitlines()[3].split() == ["0", "Linear", "linear", "no", "undone"]
        assert "yes" not in str(shown) + shown.table


def test_undone_the_summary_of_a_large_model_says_so_too() -> None:
    report = tk.use(nn.Sequential(*(nn.Linear(4, 4) for _ in range(40))))
    report.undo()
    lines = str(report).splitlines()
    assert lines[1].startswith("40 of 40 modules that could be replaced were")
    assert len(lines) == 5 and lines[4].split() == ["40", "Linear", "linear", "no", "undone"]


def test_of_a_large_model_the_answer_comes_first() -> None:
    model = nn.Sequential(*(m for _ in range(20) for m in (nn.Linear(4, 4), nn.Dropout(0.1))))
    report = tk.use(model)
    lines = str(report).splitlines()
    assert lines[0].startswith("20 of 40 modules that could be replaced were")
    assert len(lines) == 5 and lines[3].split() == ["20", "Linear", "linear", "yes"]
    assert "tk.dropout draws other random numbers" in lines[4]
    assert len(report.table.splitlines()) == 42
