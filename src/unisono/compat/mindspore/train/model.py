"""Model: a net, a loss and an optimizer, trained on all ranks as one program (`uni.to_static`).

    Model(net, loss_fn=loss, optimizer=opt).train(5, dataset, callbacks=[LossMonitor()])

At the first batch the net is traced with the global batch's shapes, its strategies make the mesh (layout.py), and the
others are searched for, by search_mode. Ops are shared among all ranks where they can be, MindSpore's default.
The loss is that of the global batch, on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from unisono.comm.communicator import Communicator
from unisono.compat.language import say
from unisono.compat.mindspore import context, ir
from unisono.compat.mindspore.common.tensor import plain, wrapped
from unisono.compat.mindspore.communication import joined
from unisono.compat.mindspore.context import ParallelMode
from unisono.compat.mindspore.dataset.datasets import Dataset
from unisono.compat.mindspore.diagnosis import misplaced_arguments
from unisono.compat.mindspore.layout import mesh_for
from unisono.compat.mindspore.nn.cell import name_of
from unisono.compat.mindspore.nn.optim import Optimizer
from unisono.compat.mindspore.ops.primitive import Primitive, ShapeError, checked_strategies
from unisono.compat.mindspore.train.batches import gathered, global_shape, shard_counts
from unisono.compat.mindspore.train.callback import Callback, RunContext
from unisono.errors import UsageError
from unisono.graph.program.program import Program
from unisono.parallel.static.to_static import to_static

Arrays = Sequence[Any]


class Model:
    """`train`, `eval` and `predict`."""

    def __init__(
        self,
        network: nn.Module,
        loss_fn: Any = None,
        optimizer: Optimizer | None = None,
        metrics: Any = None,
        eval_network: Any = None,
        eval_indexes: Any = None,
        amp_level: str = "O0",
        boost_level: str = "O0",
    ) -> None:
        """Without loss_fn, the net gives the loss, of all columns of the dataset."""
        if not isinstance(network, nn.Module):
            raise UsageError(say(f"Model({network!r:.80}): expected a Cell", f"Model({network!r:.80})：应为 Cell"))
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise UsageError(
                say(
                    f"Model(optimizer={type(optimizer).__name__}): expected one of mindspore.nn, such as "
                    "Momentum; torch's are for uni.to_static",
                    f"Model(optimizer={type(optimizer).__name__})：应为 mindspore.nn 的优化器，如 Momentum；"
                    "torch 的优化器用于 uni.to_static",
                )
            )
        if amp_level != "O0" or boost_level != "O0":
            raise UsageError(
                say(
                    f"Model(amp_level={amp_level!r}, boost_level={boost_level!r}): MindSpore would compute in "
                    "float16; expected 'O0' here, and uni.parallelize(precision='bf16') is for that",
                    f"Model(amp_level={amp_level!r}, boost_level={boost_level!r})：MindSpore 会以 float16 计算；"
                    "这里应为 'O0'，混合精度请用 uni.parallelize(precision='bf16')",
                )
            )
        if eval_network is not None or eval_indexes is not None:
            raise UsageError(
                say(
                    "Model(eval_network=, eval_indexes=) are not here; make a Model of the other net",
                    "Model(eval_network=, eval_indexes=)：这里没有；请为另一个网络建立 Model",
                )
            )
        self._net = network
        self._loss = loss_fn
        self._optimizer = optimizer
        self._metrics = _metrics(metrics)
        self._program: Program | None = None
        self._counts: list[tuple[int, ...]] = []

    @property
    def train_network(self) -> nn.Module:
        return self._net

    @property
    def predict_network(self) -> nn.Module:
        return self._net

    @property
    def program(self) -> Program:
        """The program that runs, after the first batch: print it to see every op's placements and collectives."""
        if self._program is None:
            raise UsageError(
                say(
                    "Model.program is made at the first batch of Model.train; call that first",
                    "Model.program 在 Model.train 的第一个批时建立；请先调用它",
                )
            )
        return self._program

    # ---- training ------------------------------------------------------------------------------------------------

    def train(
        self,
        epoch: int,
        train_dataset: Dataset,
        callbacks: Callback | Iterable[Callback] | None = None,
        dataset_sink_mode: bool = False,
        sink_size: int = -1,
        initial_epoch: int = 0,
    ) -> None:
        """Train for epochs of the dataset. Afterwards the net has the trained parameters, in full, on every rank."""
        _require_epochs(epoch, initial_epoch)
        _require_dataset("train", train_dataset)
        if self._optimizer is None:
            raise UsageError(
                say(
                    "Model.train: the Model was made without an optimizer; give one, such as nn.Momentum",
                    "Model.train：建立 Model 时没有给出优化器；请给出，如 nn.Momentum",
                )
            )
        comm = joined()
        listed = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or ())
        args = SimpleNamespace(
            network=self._net, train_network=self._net, optimizer=self._optimizer, loss_fn=self._loss, mode="train",
            train_dataset=train_dataset, epoch_num=epoch, batch_num=0, cur_epoch_num=0, cur_step_num=0,
            net_outputs=None, checkpoint=self._checkpoint, device_number=comm.size, list_callback=listed,
            parallel_mode=context.get_auto_parallel_context("parallel_mode"), dataset_sink_mode=dataset_sink_mode,
        )  # fmt: skip
        args.batch_num = train_dataset.get_dataset_size()
        if not args.batch_num:
            raise UsageError(say("Model.train: the dataset gives no batches", "Model.train：数据集没有给出批"))
        self._net.train()
        if self._program is not None:  # the net may have been given other parameters since
            self._program.shards.load_tensors(dict(self._net.state_dict()))
        run = RunContext(args)
        _call(listed, "begin", run)
        for args.cur_epoch_num in range(initial_epoch + 1, epoch + 1):
            _call(listed, "epoch_begin", run)
            for row in train_dataset:
                _call(listed, "step_begin", run)
                args.net_outputs = wrapped(self._step(row, train_dataset, comm))
                args.cur_step_num += 1
                _call(listed, "step_end", run)
                if run.get_stop_requested():
                    break
            _call(listed, "epoch_end", run)
            if run.get_stop_requested():
                break
        _call(listed, "end", run)
        self._take_back()

    def _step(self, row: Arrays, dataset: Dataset, comm: Communicator) -> torch.Tensor:
        columns = [_tensor(each) for each in row]
        if self._program is None:
            self._program = self._compiled(columns, dataset, comm)
        assert self._optimizer is not None
        for group in self._program.optimizer.param_groups:
            group["lr"] = self._optimizer.rate(self._program.steps)
        return self._program.train()(self._batch(columns, comm))

    def _batch(self, columns: Sequence[torch.Tensor], comm: Communicator) -> tuple[Any, Any]:
        if len(columns) != len(self._counts):
            raise UsageError(
                say(
                    f"a batch of {len(columns)} columns, where the first had {len(self._counts)}",
                    f"这个批有 {len(columns)} 列，而第一个批有 {len(self._counts)} 列",
                )
            )
        full = [gathered(each, counts, comm) for each, counts in zip(columns, self._counts, strict=True)]
        return self._paired(full)

    def _paired(self, columns: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        """(inputs, targets), as a program takes them."""
        return (columns[0], columns[1]) if self._loss is not None else (tuple(columns), None)

    def _take_back(self) -> None:
        """The net's parameters become the trained ones."""
        state = self.program.state_dict()["model"]
        with torch.no_grad():
            for name, tensor in (*self._net.named_parameters(), *self._net.named_buffers()):
                if name in state:
                    tensor.copy_(state[name])

    def _checkpoint(self, integrated: bool) -> dict[str, torch.Tensor]:
        """Parameters by MindSpore's names, and the optimizer's states as STATE.NAME; of the rank's shards if not
        integrated."""
        names = {path: name_of(parameter, path) for path, parameter in self._net.named_parameters()}
        program = self.program
        state = program.state_dict(local=not integrated)
        saved = {names.get(path, path): tensor.detach().cpu() for path, tensor in state["model"].items()}
        own = list(program.shards.parameters)
        for key, states in state["optimizer"]["state"].items():
            path = own[key] if isinstance(key, int) else str(key)
            for kind, value in states.items():
                if isinstance(value, torch.Tensor):
                    saved[f"{_STATES.get(kind, kind)}.{names.get(path, path)}"] = value.detach().cpu()
        return saved

    # ---- compilation ---------------------------------------------------------------------------------------------

    def _compiled(self, columns: Sequence[torch.Tensor], dataset: Dataset, comm: Communicator) -> Program:
        self._require_columns(len(columns), dataset)
        mode = _require_mode(comm.size)
        self._require_all_parameters()
        shapes = [tuple(each.shape) for each in columns]
        strategy = context.get_auto_parallel_context("dataset_strategy")
        self._counts = shard_counts(strategy, shapes, dataset.columns, comm.size)
        example = [
            torch.empty(global_shape(shape, counts), dtype=each.dtype)
            for shape, counts, each in zip(shapes, self._counts, columns, strict=True)
        ]
        marked = self._require_fit(example, shapes, dataset)
        is_searched = mode == ParallelMode.AUTO_PARALLEL
        search = context.SEARCHES[context.get_auto_parallel_context("search_mode")] if is_searched else "propagate"
        mesh = mesh_for(marked, comm.size, search)
        zero = 1 if context.get_auto_parallel_context("enable_parallel_optimizer") and "dp" in mesh.names else 0
        assert self._optimizer is not None
        program: Program = to_static(
            self._net,
            example=self._paired(example),
            mesh=mesh,
            loss=self._loss_of(),
            optimizer=self._optimizer.make,
            search=search,
            fully_use_devices=True,
            zero=zero if comm.size > 1 else 0,
        )
        if level := context.get_context("save_graphs"):
            folder = ir.save(program.lowered, self._net, Path(context.get_context("save_graphs_path")), comm.rank)
            if level == 3:
                program.draw(folder / "18_execute.svg")
        return program

    def _loss_of(self) -> Any:
        return self._loss if self._loss is not None else _as_it_is

    def _require_columns(self, count: int, dataset: Dataset) -> None:
        if self._loss is not None and count != 2:
            raise UsageError(
                say(
                    f"the dataset has the columns {', '.join(dataset.columns)}, and a Model with loss_fn "
                    "takes data and label; MindSpore refuses it too: make the loss a part of the net, and "
                    "leave out loss_fn",
                    f"数据集的列为 {', '.join(dataset.columns)}，而有 loss_fn 的 Model 接受数据和标签两列；"
                    "MindSpore 同样会报错：请把 loss 写进网络，并去掉 loss_fn",
                )
            )

    def _require_all_parameters(self) -> None:
        assert self._optimizer is not None
        own = {id(parameter): path for path, parameter in self._net.named_parameters() if parameter.requires_grad}
        given = {id(parameter) for parameter in self._optimizer.parameters}
        left = [path for number, path in own.items() if number not in given]
        if left or not given <= set(own):
            has = len(given & set(own))
            wrong = (f", not {left[0]}", f"，缺少 {left[0]}") if left else (", and others", "，并有其它参数")
            raise UsageError(
                say(
                    f"the optimizer has {has} of the net's {len(own)} trainable parameters{wrong[0]}; give "
                    "net.trainable_params(), and requires_grad=False to parameters that are to stay",
                    f"优化器有网络 {len(own)} 个可训练参数中的 {has} 个{wrong[1]}；请给出 net.trainable_params()，"
                    "不训练的参数请设 requires_grad=False",
                )
            )

    def _require_fit(
        self, example: list[torch.Tensor], shapes: list[tuple[int, ...]], dataset: Dataset
    ) -> list[Primitive]:
        """Run the net and the loss on shapes alone, so that what cannot be is refused before ranks wait. The ops with
        strategies that were called."""
        # not every version of torch makes fake tensors of a class of parameters that it does not know
        shown = {name: each.detach().as_subclass(torch.Tensor) for name, each in self._net.named_parameters()}
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), checked_strategies() as marked:
                inputs, target = self._paired([torch.empty(each.shape, dtype=each.dtype) for each in example])
                given = (inputs,) if self._loss is not None else inputs
                outputs = functional_call(self._net, shown, given)
                loss = self._loss_of()(outputs, target)
        except ShapeError as error:
            raise self._unfit(error, example, shapes, dataset) from None
        except (UsageError, NotImplementedError):
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            listed = ", ".join(f"{name!r} {shape}" for name, shape in zip(dataset.columns, shapes, strict=True))
            swapped = misplaced_arguments(getattr(dataset, "source", None))
            cause = f"; {swapped}" if swapped is not None else ""
            raise UsageError(
                say(
                    f"the net or its loss cannot take the dataset's columns {listed} ("
                    f"{str(error).splitlines()[0]}){cause}",
                    f"网络或 loss 无法接受数据集的列 {listed}（{str(error).splitlines()[0]}）{cause}",
                )
            ) from error
        if not isinstance(loss, torch.Tensor) or loss.dim():
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise UsageError(
                say(
                    f"the loss is {shape}, where one number is expected; MindSpore would train on the sum of "
                    "its elements and print their mean: use reduction='mean' or 'sum'",
                    f"loss 为 {shape}，应为一个数；MindSpore 会按各元素之和训练而打印其均值：请用 "
                    "reduction='mean' 或 'sum'",
                )
            )
        return list(dict.fromkeys(marked))

    def _unfit(
        self, error: ShapeError, example: list[torch.Tensor], shapes: list[tuple[int, ...]], dataset: Dataset
    ) -> UsageError:
        """An op that cannot take a column as it is: which column, and whether arguments of what made it are swapped."""
        whole = [tuple(each.shape) for each in example]
        given = error.shapes[error.number]
        if given not in whole:
            return error
        number = whole.index(given)
        swapped = misplaced_arguments(getattr(dataset, "source", None))
        net, column = type(self._net).__name__, dataset.columns[number]
        cause = f": {swapped}" if swapped is not None else "; MindSpore refuses it too: make the two agree"
        zh_cause = f"：{swapped}" if swapped is not None else "；MindSpore 同样会报错：请使两者一致"
        return UsageError(
            say(
                f"{error.op.shown} of {net} takes {error.expected}, but column {column!r} of the dataset has shape "
                f"{shapes[number]}{cause}",
                f"{net} 的 {error.op.shown} 的输入形状为 {', '.join(map(str, error.shapes))}，彼此不符，而数据集的列 "
                f"{column!r} 的形状为 {shapes[number]}{zh_cause}",
            )
        )

    # ---- without training ----------------------------------------------------------------------------------------

    def eval(self, valid_dataset: Dataset, callbacks: Any = None, dataset_sink_mode: bool = False) -> dict[str, float]:
        """The metrics on a dataset, of global batches: {"loss": 0.3, "accuracy": 0.9}."""
        _require_dataset("eval", valid_dataset)
        if not self._metrics:
            raise UsageError(
                say(
                    "Model.eval: the Model was made without metrics; give some, such as metrics={'loss'}",
                    "Model.eval：建立 Model 时没有给出指标；请给出，如 metrics={'loss'}",
                )
            )
        comm = joined()
        totals, samples = dict.fromkeys(self._metrics, 0.0), 0
        mode = self._net.training
        self._net.eval()
        with torch.no_grad():
            for row in valid_dataset:
                columns = [_tensor(each) for each in row]
                counts = shard_counts(
                    context.get_auto_parallel_context("dataset_strategy"),
                    [tuple(each.shape) for each in columns], valid_dataset.columns, comm.size,
                )  # fmt: skip
                full = [gathered(each, cut, comm) for each, cut in zip(columns, counts, strict=True)]
                inputs, target = self._paired(full)
                outputs = self._net(*((inputs,) if self._loss is not None else inputs))
                for name in totals:
                    value = _METRICS[name](outputs, target, self._loss_of())
                    totals[name] += float(value) * len(full[0])
                samples += len(full[0])
        self._net.train(mode)
        return {name: total / samples for name, total in totals.items()}

    def predict(self, *predict_data: Any) -> Any:
        """The net's outputs for full inputs, on this rank."""
        mode = self._net.training
        self._net.eval()
        with torch.no_grad():
            made = self._net(*(plain(_tensor(each)) for each in predict_data))
        self._net.train(mode)
        return wrapped(made)


_STATES = {"momentum_buffer": "moments", "exp_avg": "moment1", "exp_avg_sq": "moment2"}


def _as_it_is(outputs: Any, target: Any) -> Any:
    return outputs


def _accuracy(outputs: torch.Tensor, target: torch.Tensor, loss: Any) -> torch.Tensor:
    classes = target if target.dim() < outputs.dim() else target.argmax(1)
    return (outputs.argmax(1) == classes).float().mean()


_METRICS: dict[str, Any] = {
    "loss": lambda outputs, target, loss: loss(outputs, target),
    "mse": lambda outputs, target, loss: (outputs - target).square().mean(),
    "mae": lambda outputs, target, loss: (outputs - target).abs().mean(),
    "accuracy": _accuracy,
}
_METRICS["acc"] = _METRICS["accuracy"]


def _metrics(given: Any) -> list[str]:
    listed = list(given or ())
    for name in listed:
        if name not in _METRICS or isinstance(given, dict):
            raise UsageError(
                say(
                    f"Model(metrics={given!r}): expected names among {', '.join(_METRICS)}",
                    f"Model(metrics={given!r})：应为 {', '.join(_METRICS)} 中的名字",
                )
            )
    return listed


def _call(callbacks: Sequence[Callback], when: str, run: RunContext) -> None:
    for callback in callbacks:
        getattr(callback, f"on_train_{when}")(run)


def _tensor(given: Any) -> torch.Tensor:
    made = plain(given) if isinstance(given, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(given))
    return made.float() if made.dtype == torch.float64 else made


def _require_epochs(epoch: int, initial: int) -> None:
    if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= initial < epoch:
        raise UsageError(
            say(
                f"Model.train({epoch!r}, initial_epoch={initial}): expected epochs above {initial}",
                f"Model.train({epoch!r}, initial_epoch={initial})：epoch 应大于 {initial}",
            )
        )


def _require_dataset(verb: str, dataset: Any) -> None:
    if not isinstance(dataset, Dataset):
        raise UsageError(
            say(
                f"Model.{verb}: the dataset is {type(dataset).__name__}; expected one of mindspore.dataset, "
                "such as GeneratorDataset",
                f"Model.{verb}：数据集是 {type(dataset).__name__}；应为 mindspore.dataset 中的，如 GeneratorDataset",
            )
        )


def _require_mode(ranks: int) -> str:
    mode: str = context.get_auto_parallel_context("parallel_mode")
    devices = context.get_auto_parallel_context("device_num")
    if devices is not None and devices != ranks:
        raise UsageError(
            say(
                f"set_auto_parallel_context(device_num={devices}), but {ranks} ranks are running; MindSpore would "
                f"build groups of {devices} devices, and fail or wait for those that are not there: start {devices} "
                f"ranks (unisono run -n {devices}), or leave out device_num",
                f"set_auto_parallel_context(device_num={devices})，但启动了 {ranks} 个进程；MindSpore 会建立"
                f" {devices} 个设备的通信组，然后报错或一直等待："
                f"请启动 {devices} 个进程（unisono run -n {devices}），或去掉 device_num",
            )
        )
    if ranks > 1 and mode == ParallelMode.STAND_ALONE:
        raise UsageError(
            say(
                f"parallel_mode is stand_alone on {ranks} ranks: MindSpore would train {ranks} nets that know "
                "nothing of each other; set_auto_parallel_context(parallel_mode=...) to data_parallel, "
                "semi_auto_parallel or auto_parallel, or start one",
                f"parallel_mode 为 stand_alone，而有 {ranks} 个进程：MindSpore 会训练 {ranks} 个互不相知的网络；"
                "请用 set_auto_parallel_context(parallel_mode=...) 设为 data_parallel、semi_auto_parallel "
                "或 auto_parallel，或只启动一个进程",
            )
        )
    if ranks > 1 and mode == ParallelMode.DATA_PARALLEL and not context.get_auto_parallel_context("gradients_mean"):
        raise UsageError(
            say(
                "parallel_mode is data_parallel with gradients_mean=False: MindSpore would add up the "
                f"gradients of {ranks} ranks, {ranks} times those of the loss on one device; set "
                "gradients_mean=True",
                f"parallel_mode 为 data_parallel 而 gradients_mean=False：MindSpore 会把 {ranks} 个进程的梯度"
                f"相加，是单设备 loss 梯度的 {ranks} 倍；请设 gradients_mean=True",
            )
        )
    return mode
