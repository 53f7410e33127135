"""The document's summary tables, what a user must change in a program for one device, with unisono beside Paddle.

python examples/seeds/002_paddle/changes.py
python examples/seeds/002_paddle/changes.py --write

Paddle's cells are the document's. Those of unisono are read off the programs of this folder, by holding each against
single.py. `--write` makes docs/seeds/002.md of them, and docs/zh/seeds/002.md, which is in Chinese; the tests hold both
against this program.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PAGE, CHINESE_PAGE = ROOT / "docs" / "seeds" / "002.md", ROOT / "docs" / "zh" / "seeds" / "002.md"
CHINESE = HERE / "changes.zh.toml"
WRAPPERS = ("parallelize", "apply_marks", "to_static", "Engine")
COLUMNS = ("`__init__` changed", "`forward` changed", "environment, strategy", "wrapping", "loading of data", "loop")

Cells = tuple[str, str, str, str, str, str]


@dataclass(frozen=True)
class Line:
    strategy: str
    paddle: Cells | None  # None: the document says that it will follow
    file: str


NO = "no"
ABSENT = ("-",) * 6
TABLES: dict[str, list[Line]] = {
    "By hand (2.2.4.1)": [
        Line("one device", (NO, NO, NO, NO, NO, "ordinary"), "single"),
        Line("data parallel", (NO, NO, "yes", "yes", "yes", "ordinary"), "manual_dp"),
        Line("model parallel", ("**yes**", NO, "yes", "yes", "yes", "ordinary"), "manual_mp"),
        Line("pipeline", ("**yes**", "**yes**", "yes", "yes", "yes", "**special**"), "manual_pp"),
        Line("group sharded", (NO, NO, "yes", "yes", "yes", "ordinary"), "manual_group_sharded"),
    ],
    "By marks, the model itself runs (2.2.4.2.1 to 2.2.4.2.4)": [
        Line("one device", (NO, NO, NO, NO, NO, "ordinary"), "single"),
        Line("data parallel", (NO, "**yes**", NO, NO, NO, "ordinary"), "semi_dp"),
        Line("model parallel", (NO, "**yes**", NO, NO, NO, "ordinary"), "semi_mp"),
        Line("pipeline", (NO, "**yes**", NO, NO, NO, "ordinary"), "semi_pp"),
        Line("group sharded", None, "semi_group_sharded"),
    ],
    "By marks, as a program (2.2.4.2.5 to 2.2.4.2.8; ours, Paddle's cells are those of the document's text)": [
        Line("data parallel", (NO, "**yes**", NO, "to_static", "to_static", "dist_model"), "static_dp"),
        Line("model parallel", (NO, "**yes**", NO, "to_static", "to_static", "dist_model"), "static_mp"),
        Line(
            "pipeline", (NO, "**yes**", NO, "to_static", "to_static", "dist_model, **loss on one rank**"), "static_pp"
        ),
        Line("group sharded", None, "static_group_sharded"),
    ],
    "By the Engine (2.2.4.3)": [
        Line("one device", (NO, NO, NO, NO, NO, "executor"), "single_static"),
        Line("data parallel", (NO, NO, "yes", "Engine", "Engine", "Engine"), "engine_dp"),
        Line("model parallel", (NO, "**yes**", "yes", "Engine", "Engine", "Engine"), "engine_mp"),
        Line("pipeline", (NO, "**yes**", "yes", "Engine", "Engine", "Engine, **loss treated specially**"), "engine_pp"),
        Line("group sharded", (NO, NO, "yes", "Engine", "Engine", "Engine"), "engine_group_sharded"),
    ],
    "Fully automatic (2.2.2; ours, the document has no program of it)": [
        Line("searched for", ABSENT, "engine_auto"),
    ],
}


# ---- a program, read -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Code:
    """The user's part of a program: its network, training up to the end of the loop, and what is before `main`."""

    network: ast.ClassDef | ast.FunctionDef
    steps: list[ast.stmt]
    loop: ast.For
    start: list[ast.stmt]

    @classmethod
    def of(cls, file: str) -> Code:
        tree = ast.parse((HERE / f"{file}.py").read_text())
        train = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "train")
        index = next(i for i, node in enumerate(train.body) if isinstance(node, ast.For))
        loop = train.body[index]
        assert isinstance(loop, ast.For)
        main = next(node for node in tree.body if isinstance(node, ast.If))
        start = [node for node in main.body if "main(" not in ast.unparse(node)]
        return cls(_network(tree), train.body[:index], loop, start)

    @property
    def lines(self) -> list[str]:
        parts = [self.network, *self.start, *self.steps, self.loop]
        return [line for part in parts for line in ast.unparse(part).splitlines()]

    def calls(self) -> Iterator[tuple[str, ast.Call]]:
        for part in (*self.start, *self.steps, self.loop):
            for node in ast.walk(part):
                if isinstance(node, ast.Call):
                    yield ast.unparse(node.func), node


def _network(tree: ast.Module) -> ast.ClassDef | ast.FunctionDef:
    """The program's own network, or the shared one."""
    own = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SimpleNet"]
    lists = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "simple_net"]
    shared = ast.parse((HERE / "simple_net.py").read_text())
    plain = [node for node in shared.body if isinstance(node, ast.ClassDef) and node.name == "SimpleNet"]
    return (own or lists or plain)[0]


def cells(file: str) -> Cells:
    """What of single.py had to be changed."""
    code, plain = Code.of(file), Code.of("single")
    called = dict(code.calls())
    wrapper = next((name for name in WRAPPERS if f"uni.{name}" in called), None)
    source = ast.unparse(code.loop.iter)
    ordinary = ast.dump(code.loop) == ast.dump(plain.loop)
    return (
        _changed(code, plain, "__init__"),
        _changed(code, plain, "forward"),
        _strategy(code, called, wrapper),
        f"`uni.{wrapper}`" if wrapper else NO,
        NO if source == "batches(size)" else f"`{source.partition('(')[0]}`",
        "ordinary" if ordinary else f"`{_step(code.loop)}`",
    )


def _changed(code: Code, plain: Code, method: str) -> str:
    if isinstance(code.network, ast.FunctionDef):
        return "**yes**" if method == "__init__" else "**gone**"
    return NO if _method(code.network, method) == _method(plain.network, method) else "**yes**"


def _method(network: ast.AST, name: str) -> str:
    assert isinstance(network, ast.ClassDef)
    return next(ast.dump(node) for node in network.body if isinstance(node, ast.FunctionDef) and node.name == name)


def _strategy(code: Code, called: dict[str, ast.Call], wrapper: str | None) -> str:
    marks = sum(name == "uni.mark" for name, _ in code.calls())
    output = ["`uni.init`"] if "uni.init" in called else []
    output += ["mesh"] if "uni.Mesh" in called else []
    output += [f"{marks} marks"] if marks else []
    given = {keyword.arg for keyword in called[f"uni.{wrapper}"].keywords} if wrapper else set()
    output += ["plan"] if "plan" in given or wrapper == "parallelize" else []
    output += [word for word in ("zero", "microbatches", "rules") if word in given]
    return ", ".join(output) or NO


def _step(loop: ast.For) -> str:
    """The call that is a step of training."""
    first = loop.body[0]
    assert isinstance(first, ast.Assign)
    return ast.unparse(first.value)


def changed_lines(file: str) -> tuple[int, int]:
    """Lines that single.py has not, and lines that it has and this one has not; both without their formatting."""
    found = list(difflib.ndiff(Code.of("single").lines, Code.of(file).lines))
    return sum(line.startswith("+ ") for line in found), sum(line.startswith("- ") for line in found)


# ---- the page --------------------------------------------------------------------------------------------------------


def page() -> str:
    tables = [line for title, rows in TABLES.items() for line in (f"## {title}", "", *_table(rows), "")]
    return "\n".join([INTRODUCTION, *tables, DIFFERENCES, NOT_RUN, "```console", COMMAND, f"{MEMORY}```", "", REMARK])


def chinese_page() -> str:
    zh = tomllib.loads(CHINESE.read_text(encoding="utf-8"))
    tables = [
        line
        for title, rows in TABLES.items()
        for line in (f"## {zh['titles'][title]}", "", *_chinese_table(rows, zh["columns"], zh["words"]), "")
    ]
    block = INTRODUCTION[INTRODUCTION.index(NOT_RUN) : INTRODUCTION.rindex("```") + 3]
    memory = [NOT_RUN, "```console", COMMAND, f"{MEMORY}```", ""]
    return "\n".join([zh["introduction"], block, zh["printed"], *tables, zh["differences"], *memory, zh["remark"]])


def _chinese_table(rows: Sequence[Line], columns: Sequence[str], words: Mapping[str, str]) -> Iterator[str]:
    """The same cells in Chinese, but for code."""
    _, ruler, *lines = _table(rows)
    yield f"| | {' | '.join(columns)} |"
    yield ruler
    known = re.compile("|".join(rf"\b{word}\b" for word in words))
    for line in lines:
        parts = re.split("(`[^`]*`)", line)
        parts[::2] = [known.sub(lambda found: words[found[0]], part) for part in parts[::2]]
        yield "".join(parts)


def _table(rows: Sequence[Line]) -> Iterator[str]:
    yield f"| | {' | '.join(COLUMNS)} | lines | program |"
    yield f"|{'---|' * (len(COLUMNS) + 3)}"
    for row in rows:
        theirs = row.paddle or ("to follow",) * len(COLUMNS)
        both = [f"{paddle} / {own}" for paddle, own in zip(theirs, cells(row.file), strict=True)]
        new, gone = changed_lines(row.file)
        yield f"| {row.strategy} | {' | '.join(both)} | +{new} -{gone} | `{row.file}.py` |"


INTRODUCTION = """\
# What has to be changed: document 002

Made by `python examples/seeds/002_paddle/changes.py --write`; edit that program and not this page.

The document trains one network in many ways and sums up, table by table, what each asks of the user's code for one
device. Of the five tables below, three are the document's (by hand, by marks, by the Engine); those of the two ways
that it has no table for are ours. A cell is **Paddle's (from the document) / unisono's**, and unisono's is read off the
programs in `examples/seeds/002_paddle`: each is held against `single.py`, and its network against the plain one.
Lines: those of network and training that are new, and those of `single.py` that are gone. All of them give the losses
and parameters of one device:

<!-- not run: tests/examples/test_seed_002.py does -->
```console
$ python examples/seeds/002_paddle/table.py
```

It prints 27 lines, with their losses and deviations. In float64 the worst deviation of all is 3e-16; at the document's
own width, `--full --batches 2` (102,400, float32), it is 2e-6.
"""

NOT_RUN = "<!-- not run: tests/examples/test_seed_002.py does -->"

DIFFERENCES = """\
## Where they differ

- By marks, Paddle keeps the ordinary loop while the model itself runs; here a step is one call, `trainer.step(batch)`,
  which is what makes microbatches, schedules and group sharding possible there.
- A plan, a mesh or a mark is the strategy; there is no environment to set up (`uni.init` is needed only where a
  program communicates by itself, as `manual_mp.py` does).
- Marks stand beside the model (`uni.mark(model, name, ...)`), so `forward` stays as it is. Paddle's form, marks in the
  `forward`, works too: `uni.shard_tensor(self.linear1.weight, mesh, [uni.Shard(0)])`. An axis called `dp` shares the
  batch without a mark.
- Every rank is given the global batch and takes its part; `uni.Loader` and `engine.dataloader` read only that part.
- The loss is on every rank, under a pipeline too, and is that of the full batch.
- A pipeline by marks has microbatches and schedules (1F1B, F-then-B, ...), the model itself running or as a program.
- Group sharded by marks is `zero=1`, `2` or `3` beside the mesh, in `uni.apply_marks` and `uni.to_static`.
- Nothing here needs a GPU.

## The memory table of section 2.2.3.5

GPT-3 175B, one sample, activations of one layer and of all 96, from a trace of the model:
"""

COMMAND = """\
$ unisono plan examples/gpt.py:gpt3_with_dropout --devices 8 \\
      --hardware examples/seeds/002_paddle/a100_2022.toml --activations"""

REMARK = """\
The document's figures are 2736, 552, 342, 102 and 48 MB a layer, and 256.5, 51.75, 32.0625, 9.5625 and 4.5 GB. Of what
is computed again it predicts 2.7% (selective), as here, and tens of times as much (full), where it is the forward once
more: a third of a step.
"""

MEMORY = """\
gpt3_with_dropout: activations of one sample in bfloat16, on one device
plan                         a layer   96 layers   kept by unisono  collectives of a layer          again
one device                   2736 MiB  256.50 GiB  2736 MiB         -                               -
tp=8                         552 MiB   51.75 GiB   552 MiB          2 all_reduce                    -
tp=8,sp                      342 MiB   32.06 GiB   426 MiB          2 all_gather, 2 reduce_scatter  -
tp=8,sp,recompute=attention  102 MiB   9.56 GiB    186 MiB          2 all_gather, 2 reduce_scatter  2.7%
recompute=full               48 MiB    4.50 GiB    48 MiB           -                               100.0%
again: of a layer's forward, what is computed again
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="write docs/seeds/002.md and docs/zh/seeds/002.md")
    if not parser.parse_args().write:
        print(page(), end="")
    else:
        for path, text in ((PAGE, page()), (CHINESE_PAGE, chinese_page())):
            is_new = not path.exists() or path.read_text() != text
            if is_new:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}" if is_new else f"{path.relative_to(ROOT)} is up to date")
