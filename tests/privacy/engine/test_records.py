"""Records hold what each layer saw: its inputs, its output's gradient, its point, in order."""

import pytest
import torch
from oracle import draw, flat, params_of, points_of
from torch import Tensor, nn
from zoo import Gate, Net, batch, loss

from dpsweep.core.types import Tensors
from dpsweep.privacy.clip import Flat
from dpsweep.privacy.engine import BookkeepingEngine, VmapEngine
from dpsweep.privacy.engine.base import Microbatch
from dpsweep.privacy.engine.layers import find_sites
from dpsweep.privacy.engine.records import LayerCall, Unrecordable, record_calls

NUM = 3


def portion(num: int = NUM) -> Microbatch:
    return Microbatch(*batch(num), torch.ones(num, dtype=torch.bool))


def recorded(
    model: nn.Module, names: list[str], params: Tensors | None = None, weight: float = 1.0
) -> dict[str, list[LayerCall]]:
    layers = {name: model.get_submodule(name) for name in names}
    where = params_of(model) if params is None else params
    return record_calls(model, layers, loss, where, weight, portion())


def net(forward, **layers: nn.Module) -> Net:
    return Net(forward, **layers).double()


def chain() -> Net:
    return net(
        lambda net, x: net.out(net.first(x.flatten(1)).tanh()),
        first=nn.Linear(72, 5),
        out=nn.Linear(5, 4),
    )


def both(model: nn.Module) -> tuple[Tensors, Tensors]:
    """What book-keeping and vmap say about a model at one point."""
    question = (points_of(model, 1), [1.0], *batch(NUM), Flat(1e6))
    return tuple(
        engine(model, loss, NUM).clipped_sum(*question)
        for engine in (BookkeepingEngine, VmapEngine)
    )


def test_use_is_what_the_layer_was_given_and_its_outputs_gradient():
    model = chain()
    (point,) = points_of(model, 1)
    uses = recorded(model, ["first", "out"], point, weight=-2.5)
    inputs, targets = batch(NUM)
    hidden = nn.functional.linear(inputs.flatten(1), point["first.weight"], point["first.bias"])
    hidden.requires_grad_()
    outputs = nn.functional.linear(hidden.tanh(), point["out.weight"], point["out.bias"])
    outputs.retain_grad()
    (NUM * loss(outputs, targets)).backward()  # each example's own loss, not the mean
    for name, given, output in (
        ("first", inputs.flatten(1), hidden),
        ("out", hidden.tanh(), outputs),
    ):
        (use,) = uses[name]
        torch.testing.assert_close(use.inputs[0], given.detach())
        torch.testing.assert_close(use.grad, output.grad)
        assert use.weight == -2.5
        assert use.params.keys() == {"weight", "bias"}
        assert all(use.params[k] is point[f"{name}.{k}"] for k in use.params)
        assert not use.inputs[0].requires_grad
        assert not use.grad.requires_grad


def test_point_is_asked_at_and_not_the_model():
    model = chain()
    here, there = points_of(model, 2)
    at_two = [recorded(model, ["out"], point)["out"][0] for point in (here, there)]
    assert not torch.equal(at_two[0].inputs[0], at_two[1].inputs[0])
    model.load_state_dict(there)
    assert torch.equal(recorded(model, ["out"], here)["out"][0].inputs[0], at_two[0].inputs[0])


def test_calls_of_one_layer_come_in_their_order():
    model = net(
        lambda net, x: net.again(net.again(net.again(x[:, 0]).sin())).flatten(1),
        again=nn.Linear(6, 6),
    )
    uses = recorded(model, ["again"])["again"]
    assert len(uses) == 3
    own = params_of(model)
    step = nn.functional.linear(uses[0].inputs[0], own["again.weight"], own["again.bias"])
    torch.testing.assert_close(uses[1].inputs[0], step.sin())
    assert all(use.grad.norm() > 0 for use in uses)


def test_layer_that_is_not_called_has_no_record():
    model = net(lambda net, x: net.out(x.flatten(1)), idle=nn.Linear(2, 2), out=nn.Linear(72, 4))
    assert recorded(model, ["idle", "out"]).keys() == {"out"}


@pytest.mark.parametrize("cut", ["detached", "unused"])
def test_gradient_of_an_output_that_changes_nothing_is_zero(cut):
    def forward(net: Net, x: Tensor) -> Tensor:
        seen = net.head(x.flatten(1))
        return net.out(seen.detach() if cut == "detached" else x.flatten(1)[:, :4])

    model = net(forward, head=nn.Linear(72, 4), out=nn.Linear(4, 4))
    (use,) = recorded(model, ["head", "out"])["head"]
    assert use.grad.shape == (NUM, 4)
    assert (use.grad == 0).all()


def test_all_inputs_of_a_layer_are_noted():
    model = net(lambda net, x: net.gate(x[:, 0], x[:, 1]), gate=Gate())
    (use,) = recorded(model, ["gate"])["gate"]
    assert [x.shape for x in use.inputs] == [(NUM, 6, 6)] * 2
    assert use.params.keys() == {"scale", "inner.weight", "inner.bias"}


def test_root_may_be_the_layer():
    model = nn.Linear(6, 4).double()
    (use,) = recorded(model, [""])[""]
    assert use.params.keys() == {"weight", "bias"}
    assert torch.equal(use.inputs[0], batch(NUM)[0])


class Pair(nn.Module):
    """Hands on two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.scale * x, x


CANNOT = {
    "pair": net(lambda net, x: net.layer(x.flatten(1)[:, :4])[0], layer=Pair()),
    "examples folded away": net(
        lambda net, x: net.layer(x.reshape(-1, 4)).view(len(x), -1), layer=nn.Linear(4, 4)
    ),
    "no examples": net(lambda net, x: x.flatten(1) @ net.layer(draw(72, 4)), layer=nn.Linear(4, 4)),
    "one number": net(
        lambda net, x: x.flatten(1) * net.layer(draw(4)).sum(),
        layer=Net(lambda net, x: net.inner(x).sum(), inner=nn.Linear(4, 4)),
    ),
}


@pytest.mark.parametrize("kind", CANNOT)
def test_layer_whose_calls_cannot_be_told_apart_by_example_is_refused(kind):
    with pytest.raises(Unrecordable, match="layer 'layer' does not hand on one tensor of all"):
        recorded(CANNOT[kind], ["layer"])
    assert not any(module._forward_hooks for module in CANNOT[kind].modules())


def test_attention_is_as_before_even_if_the_pass_fails():
    def fail(net: Net, x: Tensor) -> Tensor:
        net.attention(x[:, 0], x[:, 0], x[:, 0])
        raise RuntimeError("midway")

    model = net(fail, attention=nn.MultiheadAttention(6, 2, batch_first=True))
    with pytest.raises(RuntimeError, match="midway"):
        recorded(model, ["attention"])
    assert "forward" not in vars(model.attention)


def test_recording_works_where_gradients_are_off():
    model = chain()
    expected = recorded(model, ["first", "out"])
    with torch.no_grad():
        found = recorded(model, ["first", "out"])
    for name, uses in expected.items():
        assert torch.equal(found[name][0].grad, uses[0].grad)


def test_module_that_two_others_hold_answers_once():
    inner = nn.Linear(6, 6, bias=False)
    model = net(
        lambda net, x: net.second(net.first(x[:, 0]).sin()),
        first=nn.Sequential(inner),
        second=nn.Sequential(inner),
    )
    ours, theirs = both(model)
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-10, atol=1e-10)


def test_attention_that_two_others_hold_answers_once():
    attention = nn.MultiheadAttention(6, 2, batch_first=True)
    model = net(
        lambda net, x: net.second[0](*[net.first[0](*[x[:, 0]] * 3)[0]] * 3)[0],
        first=nn.Sequential(attention),
        second=nn.Sequential(attention),
    )
    ours, theirs = both(model)
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-10, atol=1e-10)


def test_black_box_may_share_a_weight_within():
    box = Gate()
    box.outer = nn.Linear(6, 6, bias=False)
    box.outer.weight = box.inner.weight
    box.forward = lambda x: box.scale * box.outer(box.inner(x).sin())
    ours, theirs = both(net(lambda net, x: net.box(x[:, 0]), box=box))
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-10, atol=1e-10)


def test_black_box_that_two_others_hold_answers_once():
    box = Gate()
    model = net(
        lambda net, x: net.second[0](net.first[0](x[:, 0], x[:, 1]).sin(), x[:, 1]),
        first=nn.ModuleList([box]),
        second=nn.ModuleList([box]),
    )
    ours, theirs = both(model)
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-10, atol=1e-10)


def test_black_box_may_share_a_weight_with_a_layer_before_it():
    box, layer = Gate(), nn.Linear(6, 6)
    box.inner.weight = layer.weight
    model = net(lambda net, x: net.box(net.layer(x[:, 0]).sin(), x[:, 1]), layer=layer, box=box)
    ours, theirs = both(model)
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-10, atol=1e-10)


def test_sites_that_share_a_layer_by_one_parent_are_one():
    inner = nn.Linear(6, 6)
    model = nn.Sequential(inner, nn.Tanh(), inner)
    assert list(find_sites(model)) == ["0"]
    ours, theirs = both(nn.Sequential(nn.Flatten(2), nn.Linear(36, 6), model).double())
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-10, atol=1e-10)
