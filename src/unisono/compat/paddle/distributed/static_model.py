"""to_static: a marked layer, its loss and its optimizer as one distributed program."""

from __future__ import annotations

from typing import Any

from torch.utils._pytree import tree_leaves

from unisono.compat.language import say
from unisono.compat.paddle.distributed.auto_parallel.find_marks import mesh_of_marks
from unisono.compat.paddle.distributed.auto_parallel.strategy import Strategy
from unisono.compat.paddle.distributed.environment import comm
from unisono.compat.paddle.distributed.fleet.strategy import schedule_named
from unisono.compat.paddle.methods import with_methods
from unisono.compat.paddle.nn.layer import Layer, freeze_stopped
from unisono.compat.paddle.optimizer import Optimizer, require_all_of
from unisono.compat.paddle.static.program import InputSpec, Program, recorded
from unisono.compat.paddle.tensor import Tensor, plain
from unisono.errors import UsageError
from unisono.graph.marks.api import applied
from unisono.mesh.mesh import Mesh
from unisono.parallel.meta.meta_tensors import meta_copy
from unisono.parallel.static.to_static import to_static as make_program


class DistModel:
    """loss = dist_model(inputs, labels): a step of training, or in evaluation mode the loss only, on a global batch."""

    def __init__(
        self,
        layer: Layer,
        loader: Any = None,
        loss: Any = None,
        optimizer: Any = None,
        strategy: Strategy | None = None,
    ) -> None:
        if not callable(loss) or not isinstance(optimizer, Optimizer):
            raise UsageError(
                say(
                    "to_static(layer, loader, loss, optimizer): Paddle also makes programs that only predict; here "
                    "give a "
                    "loss and an optimizer",
                    "to_static(layer, loader, loss, optimizer)：飞桨还可生成只做预测的程序；这里请给出 loss 和 "
                    "optimizer",
                )
            )
        self.network = layer
        self._loss, self._optimizer, self._strategy = loss, optimizer, strategy or Strategy()
        self._training = True
        self._program: Any = None  # made with the first batch
        self._engine = _Programs(self, loader)

    def train(self) -> None:
        self._training = True

    def eval(self) -> None:
        self._training = False

    @property
    def program(self) -> Any:
        """unisono's program; None before the first batch."""
        return self._program

    def __call__(self, *args: Any) -> Tensor:
        given = plain(args)
        if len(given) < 2:
            raise UsageError(
                say(
                    "dist_model(inputs): Paddle predicts with it; here give inputs and labels, or use uni.to_static, "
                    "whose "
                    "program has predict",
                    "dist_model(inputs)：飞桨用它做预测；这里请给出输入和标签，或使用有 predict 的 uni.to_static",
                )
            )
        *inputs, labels = given
        batch = (inputs[0] if len(inputs) == 1 else tuple(inputs), labels)
        self.prepare(batch)
        self._program.train(self._training)
        return self._program(batch).detach().as_subclass(Tensor)

    def prepare(self, batch: tuple[Any, Any]) -> None:
        """Make the program, for batches of these shapes; the first batch does."""
        if self._program is None:
            freeze_stopped(self.network)
            require_all_of(self.network, self._optimizer)
            self._program = self._made(batch)
            self._optimizer.bind(self._program, _in_the_program, _in_the_program)

    def _made(self, batch: tuple[Any, Any]) -> Any:
        loss, strategy, ranks = self._loss, self._strategy, comm().size
        found = mesh_of_marks(self.network, batch[0])
        mesh = Mesh([ranks], ["dp"]) if found is None else found.inner
        given: dict[str, Any] = {"zero": strategy.zero(ranks)}
        if strategy.pipeline.enable:
            given["microbatches"] = strategy.pipeline.accumulate_steps
            given["schedule"] = schedule_named(strategy.pipeline.schedule_mode)
        return make_program(
            self.network,
            example=batch,
            mesh=mesh,
            loss=with_methods(loss),
            optimizer=self._optimizer.make,
            **given,
        )

    def state_dict(self, mode: str = "all") -> dict[str, Any]:
        """The full parameters; every rank calls it."""
        if self._program is None:
            return dict(self.network.state_dict())
        return dict(self._program.state_dict()["model"])

    def dist_main_program(self, mode: str | None = None) -> Any:
        return self._program


def _in_the_program() -> None:
    """optimizer.step() and clear_grad() beside a DistModel: the program has them."""


class RankProgram:
    """This rank's program as text, to print or to draw."""

    def __init__(self, program: Any) -> None:
        self.program = program

    @property
    def desc(self) -> RankProgram:
        return self

    def __str__(self) -> str:
        return str(self.program)


class _Programs:
    """What Paddle's programs print of a DistModel: dist_model._engine.main_program. Before the first batch, one of the
    loader shows the shapes."""

    def __init__(self, model: DistModel, loader: Any) -> None:
        self._model, self._loader = model, loader
        self._serial: Program | None = None

    def _shown(self) -> tuple[Any, Any]:
        if self._loader is None:
            raise UsageError(
                say(
                    "the program of to_static(layer) without a loader, from which Paddle takes the shapes too; give "
                    "the loader, or train on a batch first",
                    "to_static(layer) 没有给出 loader，飞桨也由它得知形状；请给出 loader，或先训练一个批",
                )
            )
        epoch = getattr(self._loader, "_epoch", None)
        inputs = plain(tuple(next(iter(self._loader))))
        if epoch is not None:
            self._loader._epoch = epoch  # what was read only to look at it is read again
        return (inputs[0] if len(inputs) == 2 else inputs[:-1]), inputs[-1]

    @property
    def serial_main_program(self) -> Program:
        """The program of one device."""
        if self._serial is None:
            inputs, labels = self._shown()
            model = self._model
            with applied():
                self._serial = recorded(
                    meta_copy(model.network),
                    model._loss,
                    model._optimizer,
                    [InputSpec(list(each.shape), each.dtype) for each in tree_leaves(inputs)],
                    [InputSpec(list(labels.shape), labels.dtype)],
                )
        return self._serial

    @property
    def main_program(self) -> RankProgram:
        """This rank's program."""
        if self._model.program is None:
            self.serial_main_program  # noqa: B018  # recorded before the layer is sharded
            self._model.prepare(self._shown())
        return RankProgram(self._model.program)

    @property
    def startup_program(self) -> Program:
        """Empty: layers draw their parameters when they are made."""
        return Program()

    serial_startup_program = startup_program


def to_static(
    layer: Layer, loader: Any = None, loss: Any = None, optimizer: Any = None, strategy: Strategy | None = None
) -> DistModel:
    """A program of a layer with marks, or of one without, on data ranks. The loader stays as it is."""
    return DistModel(layer, loader, loss, optimizer, strategy)
