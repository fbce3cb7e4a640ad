"""Which input channels of a linear can go, and what the others make up for: second-order saliency and least squares.

For y = x W + b with the covariance C of x, the best y from the channels K alone has the weight and bias

    V = (C_KK)^-1 C_K: W        b + m W - m_K V        m: the mean of x

and the mean squared error that is left is, for the channels S that go, tr(W_S^T ((C^-1)_SS)^-1 W_S): the saliency of
the Optimal Brain Surgeon (Hassibi and Stork 1993, equation 5) for a whole structure (Optimal BERT Surgeon, arXiv
2203.07259, equation 3; SlimGPT, arXiv 2412.18110; ZipLM, arXiv 2302.04089). Structures go one by one, the cheapest
first, and C^-1 and W are brought up to date for those that are left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Weight = npt.NDArray[np.floating]

# Of the mean variance: added to each, so that channels that others determine do not take weights without bound.
DAMPING = 0.01
# Channels that go before the inverse is brought up to date as a whole.
BLOCK = 64
TINY = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True)
class Moments:
    """Moments of the input of a linear over `rows` of it: `mean` [in], `covariance` [in, in], centred."""

    mean: Numbers
    covariance: Numbers
    rows: int

    @property
    def damped(self) -> Numbers:
        power = float(np.diag(self.covariance).mean())
        return np.asarray(self.covariance + DAMPING * max(power, TINY) * np.eye(len(self.mean)))


def removal_order(moments: Moments, weight: Weight, structures: npt.NDArray[np.int64]) -> list[int]:
    """The numbers of the structures in the order in which they go, all but the last one.

    Args:
        weight: [in, out].
        structures: the input channels of each, [structures, channels of each].
    """
    inverse = np.asarray(np.linalg.inv(moments.damped), np.float64)
    single = structures.shape[1] == 1
    return _channels(inverse, weight, structures[:, 0]) if single else _blocks(inverse, weight, structures)


def compensated(
    moments: Moments, weight: Weight, bias: Weight | None, kept: npt.NDArray[np.int64]
) -> tuple[Numbers, Numbers]:
    """(weight [kept, out], bias [out]) of the linear that reads the channels `kept` alone and errs least.

    The damping pulls towards the weights as they were: where it is all, nothing changes but the bias.
    """
    damped, old = moments.damped, weight.astype(np.float64)
    new = np.asarray(np.linalg.solve(damped[np.ix_(kept, kept)], damped[kept] @ old), np.float64)
    moved = moments.mean @ old - moments.mean[kept] @ new
    return new, moved if bias is None else bias + moved


def _blocks(inverse: Numbers, weight: Weight, structures: npt.NDArray[np.int64]) -> list[int]:
    weight, left, order = weight.astype(np.float64), list(range(len(structures))), list[int]()
    while len(left) > 1:
        costs = []
        for each in left:
            own = structures[each]
            costs.append(float(np.sum(weight[own] * np.linalg.solve(inverse[np.ix_(own, own)], weight[own]))))
        gone = left.pop(int(np.argmin(costs)))
        order.append(gone)
        own = structures[gone]
        spread = np.linalg.solve(inverse[np.ix_(own, own)], inverse[own]).T
        weight = weight - spread @ weight[own]
        inverse = inverse - spread @ inverse[own]
    return order


def _channels(inverse: Numbers, weight: Weight, channels: npt.NDArray[np.int64]) -> list[int]:
    """The same of single channels, at the cost of one product of matrices for BLOCK of them.

    Within a block of removals C^-1 and W stay as they are; `spread` and `taken` hold what is to be taken off them:
    C^-1 - spread spread^T and W - spread taken.
    """
    inverse, weight = inverse[np.ix_(channels, channels)], weight[channels].astype(np.float64)
    left, order = np.arange(len(channels)), list[int]()
    while len(left) > 1:
        block = min(BLOCK, len(left) - 1)
        spread, taken = np.zeros((len(left), block)), np.zeros((block, weight.shape[1]))
        diagonal, squares = np.diag(inverse).copy(), np.einsum("ij,ij->i", weight, weight)
        alive = np.ones(len(left), bool)
        for i in range(block):
            gone = int(np.where(alive, squares / np.where(alive, diagonal, 1), np.inf).argmin())
            column = inverse[:, gone] - spread[:, :i] @ spread[gone, :i]
            row = weight[gone] - spread[gone, :i] @ taken[:i]
            root = np.sqrt(column[gone])
            spread[:, i], taken[i] = column / root, row / root
            share = column / column[gone]
            product = weight @ row - spread[:, :i] @ (taken[:i] @ row)
            squares = np.maximum(squares - 2 * share * product + share**2 * (row @ row), 0)
            diagonal = diagonal - spread[:, i] ** 2
            alive[gone] = False
            order.append(int(left[gone]))
        stays = np.flatnonzero(alive)
        inverse = inverse[np.ix_(stays, stays)] - spread[stays] @ spread[stays].T
        weight, left = weight[stays] - spread[stays] @ taken, left[stays]
    return order
