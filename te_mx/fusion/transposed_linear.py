"""A linear layer of another library whose weight is [in, out]: what it needs to run in MXFP8."""

from torch import Tensor
from torch.fx import Proxy

from te_mx.autograd import node
from te_mx.fusion.class_swap import LayerInPlace


class TransposedLinear(LayerInPlace):
    """Mixin before the class of a layer ``y = x @ weight + bias``. The products read a view of the
    weight, so no second copy is kept."""

    _reads_held = False

    def _sizes(self) -> tuple[int, int]:
        """(in, out)."""
        raise NotImplementedError

    def _te_mx_forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features], as te_mx.Linear on the transposed weight
        inside `te_mx.autocast`; outside of it what the class does."""
        if isinstance(x, Proxy):
            return self._as_leaf(x)
        settings = self._settings()
        if settings is None:
            return super().forward(x)  # type: ignore[misc]
        if node.active():
            self._refuse_transforms(x)
        in_features, out_features = self._sizes()
        self._check_shape(x, "in_features", in_features)
        self._check_kind(x)
        (bias,) = self._held("bias")
        if bias is not None:
            self._check_parameter("bias", bias, (out_features,), x.device)
        (weight,) = self._held("weight")
        self._source.check(self, "weight", weight, (in_features, out_features), x.device)
        turned = None if weight is None else weight.t()
        return self._source.linear(self, x, turned, bias, settings, None)

    # --------------------------------------------------------------------- weights that stand still
    def _whole(self, key: str) -> Tensor:
        return getattr(self, key).t()

    def _masters(self, key: str) -> dict[str, Tensor]:
        made = super()._masters(key)
        return {name: value.t().contiguous() for name, value in made.items()}
