"""A user's mistakes, each on a line of its own that ends in ``# wrong``: both type checkers must complain there."""

import jax
import jax.numpy as jnp
import optax
from right import Clients, clients, error, loss, net, x

import paraxis as px

px.brodcast(x, clients)  # wrong
px.Paralell  # wrong
px.Axis("clients", 8, at_onse=2)  # wrong
px.Axis("clients", "8")  # wrong
px.map_fn(jnp.sin, x, clients, lowering="vmapped")  # wrong
px.reduce_mean(x, clients, were=x[:, 0] > 0)  # wrong
px.reduce_mean(x, 8)  # wrong
px.pmap(jnp.sin, axisname="clients")  # wrong

loss(x[0])  # wrong
loss("w", x)  # wrong
loss(x[0], x, scal=2.0)  # wrong

Clients().mean(x, x)  # wrong

px.Jit(error, net, donat=True)  # wrong
px.Vectorize(error, net, batch_axes=0)  # wrong
px.GradValues(error, net, wrtt=None)  # wrong

state = px.TrainState.create(net, optax.adam(1e-3), emma=0.9)  # wrong
px.train_step(lambda model, batch: model(batch), guards=False)  # wrong
px.fit(state, epoch=3)  # wrong
px.ensemble(lambda key: jax.random.normal(key, (3,)), 4, 0, lowering="vmapped")  # wrong
px.solve.LBFGS(lambda w: jnp.sum(w**2), max_iter=3)  # wrong
px.solve.LBGFS  # wrong
px.trian.Fitted  # wrong
px.train.Fited  # wrong
px.errors.ShapedError  # wrong
px.explain(3)  # wrong
px.show(x, 3)  # wrong
px.compare("sin", x)  # wrong
px.compare({"sin": jnp.sin}, x, second=3)  # wrong
px.tabulate(3, x)  # wrong
