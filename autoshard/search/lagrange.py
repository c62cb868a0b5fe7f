"""Search under a memory limit: prices on memory, message passing, moves of forests.

    prices      lambda_t >= 0 on what is used at time t (parts of the limit) make it a problem without rows:
                    L(lambda) = min_x cost(x) + sum_t lambda_t (usage_t(x) - 1)      <= the optimum
                message passing (SRMP, Kolmogorov 2015) bounds the inner minimum and gives an answer; the prices follow
                Polyak's step along usage - 1. The messages are kept from step to step.
    legalise    prices rise where an answer uses too much, and forests move under them, until it is legal
    polish      forests move under a random part of the prices; each connected part of the difference is taken over
                if it is cheaper and stays legal
    forests     a random induced forest of the network is set to its joint optimum by dynamic programming

Two threads with seeds of their own share the best answer; the loops hold no interpreter lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from autoshard.search import kernels
from autoshard.search.kernels import BIG
from autoshard.search.network import CAPACITY, Floats, Ints, Network
from autoshard.search.problem import GAP, Progress

CHECK = 5
"""Steps between two evaluations of the bound."""

ROUND = 20
"""Steps between two attempts at an answer."""

PATIENCE = 4
"""Checks without a better bound after which the step shrinks."""

SHRINK = 0.7
LEAST_STEP = 1e-3
RESTART = 0.3
"""The step starts at 1, shrinks by `SHRINK` down to `LEAST_STEP`, then starts again from here."""

GUESS = 0.1
"""How far above the bound the optimum is thought to be while no answer is known; a part of the bound."""

RAISE = 1.15
TRIES = 60
"""Prices of broken rows rise by this factor, this many times at most."""

POLISHES = 24
"""Moves of forests in one polish."""

HEAT = (-3.0, -0.5)
STRAY = 0.5
"""A wandering answer may lose 10^HEAT of the distance between best cost and bound with each part, and STRAY in all."""


Rules = tuple[float, int, float]
"""When to end: deadline (`time.monotonic` seconds), patience (rounds), gap (part of the cost)."""


@final
class Search:
    """One search; its threads share it.

    Attributes:
      net: the problem.
      best, cost, bound: best legal answer (None if none was found), its cost, and the lower bound.
      closest, excess: while there is none, the answer that misses the limit by least, and by how much (parts of it).
      ceiling: what no answer costs more than.
      rounds: attempts at an answer so far.
      interrupted: whether the user ended it.
    """

    def __init__(self, net: Network, starts: Sequence[Ints], tell: Callable[[Progress], None] | None = None) -> None:
        self.net = net
        self.best: Ints | None = None
        self.cost = float("inf")
        self.bound = float("-inf")
        self.closest: Ints | None = None
        self.excess = float("inf")
        self.rounds = 0
        self.interrupted = False
        self.ceiling = _most(net)
        self._begun = time.monotonic()
        self._improved = 0  # the round of the last improvement
        self._tell = tell
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self.stop = threading.Event()
        self._deadline = float("inf")
        self.starts = list(starts)
        for x in starts:
            self.offer(x)

    def run(self, deadline: float, *, seed: int, workers: int, patience: int, gap: float = GAP) -> None:
        """Searches until the deadline, until the gap is small, or until nothing got better for long.

        Args:
          deadline: `time.monotonic` seconds.
          seed: of all random decisions; with one worker the course is the same each time.
          workers: threads.
          patience: rounds without a better answer or bound after which it ends.
          gap: relative distance of cost and bound at which it ends.
        """
        seeds = np.random.SeedSequence(seed).spawn(workers)
        rules = (deadline, patience, gap)
        self._deadline = deadline
        bodies = [_Worker(self, np.random.default_rng(s)) for s in seeds]
        threads = [threading.Thread(target=self._guard, args=(b, rules), daemon=True) for b in bodies[1:]]
        for thread in threads:
            thread.start()
        try:
            bodies[0].run(rules)
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            self.stop.set()
            for thread in threads:
                thread.join()
        if self._failure is not None:
            raise self._failure

    def _guard(self, worker: _Worker, rules: Rules) -> None:
        try:
            worker.run(rules)
        except KeyboardInterrupt:  # from `tell`
            self.interrupted = True
            self.stop.set()
        except Exception as error:  # to be raised where `run` was called
            self._failure = error
            self.stop.set()

    def over(self, rules: Rules) -> bool:
        """Whether to end."""
        _, patience, gap = rules
        closed = self.best is not None and self.cost - self.bound <= gap * abs(self.cost)
        closed = closed or self.infeasible
        stuck = self.rounds - self._improved > patience
        return closed or stuck or self.out_of_time

    @property
    def out_of_time(self) -> bool:
        """Whether even what has been begun is to end."""
        return self.stop.is_set() or time.monotonic() > self._deadline

    @property
    def infeasible(self) -> bool:
        """Whether the bound proves that nothing fits: it is above the cost of every answer."""
        return self.best is None and self.bound > self.ceiling

    def offer(self, x: Ints) -> bool:
        """Takes an answer in if it is legal and better; says whether it is legal."""
        net = self.net
        cost = kernels.cost_of(x, net.size, net.off, net.cost, *net.links)
        if cost >= BIG:
            return False
        use = kernels.use_of(x, net.base, *net.memory)
        excess = float(use.max(initial=0.0)) - CAPACITY
        with self._lock:
            if excess > 0:
                if self.best is None and excess < self.excess:
                    self.closest, self.excess = x.copy(), excess
                return False
            if cost < self.cost:
                if cost < self.cost * (1 - 1e-6):
                    self._improved = self.rounds
                self.best, self.cost = x.copy(), cost
                self._report()
        return True

    def raise_bound(self, bound: float) -> None:
        """Takes in a lower bound."""
        with self._lock:
            if bound > self.bound:
                if bound > self.bound + 1e-6 * abs(bound):
                    self._improved = self.rounds
                self.bound = min(bound, self.cost)
                self._report()

    def _report(self) -> None:
        if self._tell is not None:
            self._tell(Progress(time.monotonic() - self._begun, self.cost, self.bound))


def _most(net: Network) -> float:
    """An upper bound of the cost of every answer of finite cost."""
    total = 0.0
    for i in range(len(net.size)):
        cost = net.cost[net.off[i] : net.off[i + 1]]
        total += float(cost[cost < BIG].max(initial=-BIG))
        for a in range(int(net.adj[i]), int(net.adj[i + 1])):
            j = int(net.other[a])
            if j > i:
                table = net.table[net.tab[a] : net.tab[a] + net.size[i] * net.size[j]]
                total += float(table[table < BIG].max(initial=-BIG))
    return total + 1e-6 * abs(total)


@final
class _Worker:
    """One thread's prices, messages and random numbers."""

    def __init__(self, search: Search, rng: np.random.Generator) -> None:
        net = search.net
        self.search = search
        self.net = net
        self.rng = rng
        self.prices = np.zeros(len(net.base))
        self.priced = net.cost.copy()
        self.moved = np.zeros(net.messages)
        self.node = np.empty_like(net.cost)
        self.own: Ints | None = None
        self.own_cost = float("inf")

    def run(self, rules: Rules) -> None:
        """Steps of prices until the search is over."""
        net, search = self.net, self.search
        x = np.zeros(len(net.size), np.int64)
        theta, bound, highest, waited = 1.0, float("-inf"), float("-inf"), 0
        for start in search.starts:
            self.polish(start.copy(), self.prices, POLISHES // 4)
        step = 0
        while not search.over(rules):
            self.pass_messages(x)
            slack = self.use(x) - 1.0
            if step % CHECK == 0:
                bound = self.bound()
                search.raise_bound(bound)
                if bound > highest + 1e-7 * abs(bound):
                    highest, waited = bound, 0
                else:
                    waited += 1
                if waited == PATIENCE:
                    theta, waited = theta * SHRINK, 0
                if theta < LEAST_STEP:
                    theta, highest = RESTART, bound
            if step % ROUND == 0 or step == CHECK:
                self.attempt(x)
            goal = search.cost if search.best is not None else bound + GUESS * abs(bound)
            self.climb(slack, theta * max(goal - bound, 1e-6 * abs(bound)))
            step += 1

    def pass_messages(self, x: Ints) -> None:
        """Messages there and back under the prices of now; reads an answer off into x."""
        net = self.net
        self.price(self.prices)
        kernels.gather(net.size, net.off, self.priced, self.moved, net.msg, net.adj, self.node)
        for forward in (True, False):
            kernels.send(forward, net.size, net.off, self.node, self.moved, net.msg, net.back, *net.links, x)

    def bound(self) -> float:
        """The lower bound that messages and prices give."""
        net = self.net
        inner = kernels.bound_of(net.size, net.off, self.node, self.moved, net.msg, net.back, *net.links)
        return inner + float(self.prices @ (net.base - CAPACITY))

    def climb(self, slack: Floats, rise: float) -> None:
        """A step of the prices along what is used too much, that would raise the bound by `rise` if it were linear."""
        direction = np.where((self.prices > 0) | (slack > 0), slack, 0.0)
        norm = float(direction @ direction)
        if norm > 0:
            self.prices = np.maximum(self.prices + rise / norm * direction, 0.0)

    def attempt(self, x: Ints) -> None:
        """Tries to make a legal answer of one that prices gave, and to better it or the best one."""
        search = self.search
        y = self.legalise(x.copy())
        if y is not None:
            self.polish(y, self.prices, POLISHES)
        if search.best is not None:
            self.polish(search.best.copy(), self.prices, POLISHES)
            self.wander()
        search.rounds += 1

    def wander(self) -> None:
        """Polishes an answer of its own that may get worse for a while; back to the best where it strays too far."""
        search = self.search
        assert search.best is not None, "there is nothing to start from"
        spread = max(search.cost - search.bound, 1e-9 * abs(search.cost))
        if self.own is None or self.own_cost > search.cost + STRAY * spread:
            self.own = search.best.copy()
        self.own_cost = self.polish(self.own, self.prices, POLISHES, spread * 10.0 ** self.rng.uniform(*HEAT))

    def legalise(self, x: Ints) -> Ints | None:
        """A legal answer near x."""
        prices = self.prices.copy()
        scale = max(float(prices.max(initial=0.0)), 1e-12) * 0.01
        for _ in range(TRIES):
            if self.search.out_of_time:
                return None
            over = self.use(x) > CAPACITY
            if not over.any():
                return x if self.search.offer(x) else None
            prices = np.where(over, prices * RAISE + scale, prices)
            self.price(prices)
            self.move(x, self.priced)
        self.search.offer(x)
        return None

    def polish(self, x: Ints, prices: Floats, times: int, heat: float = 0.0) -> float:
        """Betters a legal answer, and offers it; parts of moves may cost up to `heat` more at first.

        Returns:
          Its cost; infinite if it is not legal.
        """
        net = self.net
        use = self.use(x)
        if (use > CAPACITY).any():
            return float("inf")
        y = x.copy()
        for k in range(times):
            if self.search.out_of_time:
                break
            warm = heat * max(0.0, 1.0 - 1.5 * k / times)
            cost = net.cost
            if k % 2:
                self.price(prices * self.rng.uniform(0.0, 1.3))
                cost = self.priced
            self.move(y, cost)
            kernels.accept(
                x, y, net.size, net.off, cost if warm else net.cost, *net.links, use, CAPACITY, *net.memory, warm
            )
        kernels.descend(
            x, self.rng.permutation(len(x)), net.size, net.off, net.cost, *net.links, use, CAPACITY, *net.memory
        )
        self.search.offer(x)
        return kernels.cost_of(x, net.size, net.off, net.cost, *net.links)

    def price(self, prices: Floats) -> None:
        net = self.net
        kernels.price(net.size, net.off, net.cost, *net.memory, prices, self.priced)

    def use(self, x: Ints) -> Floats:
        net = self.net
        return kernels.use_of(x, net.base, *net.memory)

    def move(self, x: Ints, cost: Floats) -> None:
        net = self.net
        order = self.rng.permutation(len(x))
        kernels.move_forest(x, order, net.size, net.off, cost, *net.links)
