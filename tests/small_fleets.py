"""Small fleets with all that can stand in the way of a request, and requests for them, drawn at random."""

from hypothesis import strategies as st
from msgspec.structs import replace

import make
from kubelend.core import scoring
from kubelend.core.ledger import Ledger
from kubelend.core.models import ClusterId, Request
from kubelend.core.resources import Resources

GI = 2**30

amounts = st.integers(0, 5)
POLICIES = [
    None,
    None,
    make.policy(keep_back="cpu=1,memory=1Gi"),
    make.policy(max_lent="cpu=3,gpu=1"),
    make.policy(max_per_requester="cpu=2,memory=2Gi"),
    make.policy(max_per_requester="cpu=3", max_lent="cpu=4", keep_back="cpu=1", allow=["r", "a"]),
    make.policy(hours=["13:00-14:00"]),
]
offers = st.builds(
    lambda cpu, memory, gpu, fpga, prices, labels, policy: make.advertisement(
        "-",
        Resources(cpu * 1000, memory * GI, gpu, 0, {"example.com/fpga": fpga}),
        prices=prices,
        labels=labels,
        policy=policy,
    ),
    amounts,
    amounts,
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from(
        [None, make.price_list(cpu="0.1", memory="0.07"), make.price_list("EUR", cpu="0.3")]
    ),
    st.sampled_from([{}, {"zone": "x"}, {"zone": "y", "ssd": "yes"}]),
    st.sampled_from(POLICIES),
)


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    desk = make.Desk()
    for name in "abcd"[: draw(st.integers(0, 4))]:
        desk.advertise(name, replace(draw(offers), cluster=ClusterId(name)))
    for cpu in draw(st.lists(st.integers(1, 3), max_size=2)):
        desk.ask(f"cpu={cpu},memory=1Gi")
    return desk.ledger


@st.composite
def requests(draw: st.DrawFn) -> Request:
    cpu, memory = draw(st.integers(0, 4)), draw(st.integers(0, 3))
    gpu, fpga = draw(st.sampled_from([(0, 0), (0, 0), (1, 0), (2, 1)]))
    wanted = Resources(cpu * 1000, memory * GI, gpu, 0, {"example.com/fpga": fpga})
    return make.request(
        wanted or make.resources("cpu=1"),
        requester=draw(st.sampled_from("ra")),
        labels=draw(st.sampled_from([{}, {}, {}, {"zone": "x"}, {"zone": "y", "ssd": "no"}])),
        max_price=draw(st.sampled_from([None, None, None, "0", "0.05", "0.2"])),
        currency=draw(st.sampled_from(["USD", "EUR"])),
        policy=draw(st.sampled_from(sorted(scoring.SCORING_POLICIES))),
        weights=draw(st.sampled_from([{}, {}, {"price": 1.0}])),
    )
