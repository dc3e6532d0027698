"""Reconciles one cluster namespace: answers requests, and mirrors the ledger's state into its objects.

`ClusterNamespaces` calls `reconcile` after each change, one call at a time per namespace. The caller
is the cluster of the namespace, whatever the objects claim.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import msgspec
import structlog
from msgspec.structs import replace

from kubelend.controllers import mailbox_answers, mailbox_plans, marks, refusals
from kubelend.controllers.alarms import Alarm
from kubelend.controllers.mailbox_answers import Answers
from kubelend.controllers.mailbox_pen import Means, Pen
from kubelend.controllers.mailbox_plans import Remove, Step, Tell, Told
from kubelend.controllers.mailbox_sessions import Session
from kubelend.controllers.mailbox_shelves import Shelf, Unread
from kubelend.core.errors import KubelendError, NotLeader, NotReady
from kubelend.core.ledger import Ledger
from kubelend.core.models import ClusterId, ReservationId
from kubelend.core.models import Reservation as Record
from kubelend.kube import resources
from kubelend.wire import mailboxes
from kubelend.wire.broker_objects import (
    RESERVATION_FINALIZER,
    ClusterAdvertisement,
    Reservation,
)
from kubelend.wire.objects import Object, ProviderInstruction, Question, Reply

log = structlog.get_logger("kubelend.cluster_namespaces")

INSTRUCTIONS = resources.of(ProviderInstruction)


class Clerk:
    """Reconciles one cluster namespace."""

    def __init__(
        self, means: Means, namespace: str, cluster: ClusterId, wake: Callable[[], None]
    ) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.shelf = Shelf()
        self.is_closing = False
        """Whether the namespace has a deletionTimestamp, so that no object can be created in it."""
        self._means = means
        self._answers = Answers(means.broker, means.terms, means.speakers, cluster, namespace)
        self._wake = wake
        self._session: Session | None = None
        self._ledger: Ledger | None = None
        """The ledger that was mirrored last: after a reload or a change of leader it is another one."""
        self._pen = Pen(means, namespace, cluster, self.shelf)
        self._removals = Alarm()
        """When the next rejected request may be deleted."""
        self._spoilt: dict[str, str] = {}
        """Errors by object, to log each once."""

    @property
    def is_due(self) -> bool:
        """Whether time alone requires a reconcile."""
        broker = self._means.broker
        return self._removals.rings(broker.clock()) and broker.leadership.leads

    async def attend(self) -> None:
        """Process all that is pending. After an error everything is processed again."""
        if not self._means.broker.leadership.leads:
            return
        try:
            await self._attend()
        except BaseException:
            self.shelf.look_at_all()
            self._ledger = None
            raise

    async def dismiss(self) -> None:
        """The namespace is no cluster namespace any more, or the broker stops."""
        stream, self._session = self._session, None
        if stream is not None:
            await stream.end()

    # -- reconcile

    async def _attend(self) -> None:
        session = self.shelf.mailbox
        request = None if session is None else mailbox_plans.unanswered(session)
        self._hear(request)
        self._look_at_refused()
        error = await self._catch_up()
        while pending := self.shelf.take():
            if not pending.objects and not pending.reservations:
                break
            error = await self._handle(pending, error)
        if request is not None:
            await self._sparing(mailboxes.NAME, self._answer_mailbox, request, error)
        else:
            await self._show_session()
        if error is not None:
            raise error

    async def _handle(self, unread: Unread, before: KubelendError | None) -> KubelendError | None:
        """Returns the first error: an object that cannot be written does not block the others."""
        try:
            await self._answer_all(unread.objects)
            if before is None:
                return await self._tell_all(unread.reservations)
        except NotLeader:
            raise
        except KubelendError as error:
            return before or error
        return before

    async def _catch_up(self) -> KubelendError | None:
        """After a reload every object may be wrong, including those whose record the ledger has lost."""
        try:
            ledger = await self._means.broker.read(lambda ledger: ledger)
        except KubelendError as error:
            return error
        if ledger is not self._ledger:
            self._ledger = ledger
            self.shelf.look_at_all()
            for record in ledger.touching(self.cluster):
                self.shelf.hear(record.id)
        return None

    async def _answer_all(self, found: Iterable[Object]) -> None:
        kinds = (Reservation, ProviderInstruction)
        first = [one for one in found if isinstance(one, kinds)]
        await _together(self._sparing(one.key, self._answer, one) for one in first)
        for one in found:
            if isinstance(one, ClusterAdvertisement) and mailbox_plans.unanswered(one):
                await self._sparing(one.key, self._answer_advertisement, one)

    async def _answer(self, seen: Told) -> None:
        if isinstance(seen, Reservation) and marks.is_leaving(seen.metadata):
            await self._let_go(seen)
            return
        request = mailbox_plans.unanswered(seen)
        self._hear(request)
        verb = mailbox_plans.wished(seen) if isinstance(seen, Reservation) else ""
        if request is None and verb:
            request = Question(_last_question(seen), verb)
        if request is None:
            if isinstance(seen, Reservation):
                await self._keep(seen)
        elif isinstance(seen, Reservation):
            await self._answer_reservation(seen, request)
        else:
            await self._answer_instruction(seen, request)

    async def _keep(self, seen: Reservation) -> None:
        """A reservation without a pending request."""
        broker = self._means.broker
        due = refusals.due_in_mailbox(seen, broker.retention)
        if mailbox_plans.is_loose(seen, self.cluster):
            await self._pen.hold_on_to(seen)
        elif self._removals.is_over(due, broker.clock()):
            await self._pen.remove(seen)

    def _look_at_refused(self) -> None:
        """Their agents would have deleted them, but may no longer run."""
        if self.is_due:
            self._removals.turn_off()
            self.shelf.look_at(
                lambda one: isinstance(one, Reservation) and one.status.response is not None
            )

    # -- requests

    def _hear(self, question: Question | None) -> None:
        if question is not None and self._session is not None:
            self._session.hear(question.agent)

    async def _answer_reservation(self, seen: Reservation, question: Question) -> None:
        if question.verb == "reserve" and not marks.holds_on(seen.metadata):
            held = await self._pen.hold_on_to(seen)
            if held is None:
                return
            seen = held
        try:
            record = await self._answers.reservation(seen, question)
        except NotLeader:
            raise
        except KubelendError as error:
            if error.retryable and not question.id:  # nobody would repeat the request
                raise
            response = self._refused(seen, question, error)
            if response.body:
                await self._pen.patch_status(seen, {"response": mailboxes.reply(response)})
            else:
                now = self._means.broker.clock()
                status = mailbox_plans.refused_status(seen, error, response, now)
                await self._pen.patch_status(seen, status)
        else:
            await self._pen.tell_own(seen, record, question.id)

    async def _answer_instruction(self, seen: ProviderInstruction, question: Question) -> None:
        try:
            record = await self._answers.instruction(seen, question)
        except NotLeader:
            raise
        except KubelendError as error:
            fields = mailboxes.reply(self._refused(seen, question, error))
            await self._pen.patch(INSTRUCTIONS, seen, {"spec": {"response": fields}})
        else:
            part = mailbox_answers.part(self.cluster, record, mailbox_answers.PROVIDER)
            if part is not None:
                await self._pen.tell_lent(Tell(part, seen), question.id)

    async def _answer_advertisement(self, seen: ClusterAdvertisement) -> None:
        """The resulting instructions are written before the response, so that its reader finds them."""
        request = mailbox_plans.unanswered(seen) or Question("", "publish")
        self._hear(request)
        try:
            body, status = await self._answers.advertisement(seen, request)
            response = Reply(request.id, mailboxes.text(body))
        except NotLeader:
            raise
        except KubelendError as error:
            response = Reply(request.id, "", mailboxes.refused(error))
            status = {"message": str(error), "active": False}
        else:
            await self._tell_rest()
        status["observedGeneration"] = seen.metadata.generation
        await self._pen.patch_status(seen, status | {"response": mailboxes.reply(response)})

    async def _answer_mailbox(self, question: Question, problem: KubelendError | None) -> None:
        status: dict[str, object] = {"clusterID": self.cluster}
        response = Reply(question.id)
        try:
            if question.verb == "ping":
                self._check_ready()
            elif problem is not None:
                raise mailbox_answers.passing(problem)
            status |= await self._conversed(question)
            response = replace(response, body=await self._answers.read(question))
        except NotLeader:
            raise
        except KubelendError as error:
            response = replace(response, error=mailboxes.refused(error))
        status |= {
            "session": "" if self._session is None else self._session.name,
            "lastUpdateTime": self._means.broker.clock(),
            "response": mailboxes.reply(response),
        }
        session = self.shelf.mailbox
        if session is not None:
            await self._pen.patch_status(session, status)

    async def _conversed(self, question: Question) -> dict[str, object]:
        """Requests for the whole namespace."""
        if question.verb == "leave":
            if self._session is not None and self._session.agent == question.agent:
                await self.dismiss()
            return {}
        self._answers.admit(question, speaks=question.verb == "listen")
        if question.verb == "listen":
            await self._begin(question.agent)
        ends = await self._means.broker.read(lambda ledger: (ledger.revision, ledger.horizon))
        await self._tell_rest()
        return {"revision": ends[0], "compactedRevision": ends[1]}

    async def _begin(self, agent: str) -> None:
        means = self._means
        stream = Session(means.broker, self.cluster, agent, means.silence, self._ended)
        await stream.begin(means.speakers, f"in namespace {self.namespace}")
        previous, self._session = self._session, stream
        if previous is not None:
            await previous.end()

    def _ended(self, session: Session) -> None:
        if self._session is session:
            self._session = None
            self._wake()

    def _check_ready(self) -> None:
        if (reason := self._means.broker.unready) is not None:
            raise NotReady(f"the broker is not ready: {reason}", hint="try again later")

    async def _show_session(self) -> None:
        session = self.shelf.mailbox
        name = "" if self._session is None else self._session.name
        if session is None:
            return
        if (session.status.session, session.status.cluster_id) != (name, self.cluster):
            now = self._means.broker.clock()
            status = {"session": name, "clusterID": self.cluster, "lastUpdateTime": now}
            await self._pen.patch_status(session, status)

    def _refused(self, seen: Told, question: Question, error: KubelendError) -> Reply:
        """The body of the last response stays valid."""
        before = mailbox_plans.reply(seen) or mailboxes.NOBODY
        return Reply(question.id, before.body, mailboxes.refused(error))

    # -- the ledger's state

    async def _tell_all(self, ids: Iterable[ReservationId]) -> KubelendError | None:
        try:
            records = await self._means.broker.read(
                lambda ledger: {one: ledger.reservations.get(one) for one in ids}
            )
        except KubelendError as error:
            return error
        await _together(
            self._sparing(one, self._tell, one, record) for one, record in records.items()
        )
        return None

    async def _tell(self, id: ReservationId, record: Record | None) -> None:
        await _together([self._do(step) for step in self._steps(id, record)])

    async def _tell_rest(self) -> None:
        """Changes since the last batch, so that the reader of the next response finds them."""
        if (error := await self._tell_all(self.shelf.take_news())) is not None:
            raise error

    def _steps(self, id: ReservationId, record: Record | None) -> list[Step]:
        own, lent = self.shelf.own(id, record), self.shelf.lent(id)
        steps = mailbox_plans.mirror(self.cluster, record, own, lent)
        # Nothing can be created in a namespace that is being deleted.
        return [step for step in steps if not (self.is_closing and step.seen is None)]

    async def _do(self, step: Step) -> None:
        if isinstance(step, Remove):
            await self._means.broker.confirm()
            await self._pen.remove(step.seen)
        elif step.instruction.side is mailbox_answers.PROVIDER:
            await self._pen.tell_lent(step)
        else:
            await self._pen.tell_own(step.seen, step.instruction.reservation)

    async def _let_go(self, seen: Reservation) -> None:
        """The object is being deleted: release its reservation, then remove the finalizer."""
        await self._answers.give_back(seen, self.shelf)
        await self._means.broker.confirm()  # a stale ledger may not know the reservation
        if marks.holds_on(seen.metadata):
            left = [one for one in seen.metadata.finalizers if one != RESERVATION_FINALIZER]
            await self._pen.write_finalizers(seen, left)

    async def _sparing(
        self, what: str, work: Callable[..., Awaitable[None]], *arguments: object
    ) -> None:
        """Run `work`, and skip the object if it cannot be encoded or decoded."""
        try:
            await work(*arguments)
        except msgspec.MsgspecError as error:
            if self._spoilt.get(what) != str(error):
                self._spoilt[what] = str(error)
                log.warning(
                    "Skipping object that cannot be processed",
                    namespace=self.namespace,
                    name=what,
                    error=str(error),
                )
        else:
            self._spoilt.pop(what, None)


async def _together(work: Iterable[Awaitable[None]]) -> None:
    """Run all of it, even if some fail, then raise the first error."""
    for failure in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(failure, BaseException):
            raise failure


def _last_question(seen: Told) -> str:
    return (mailbox_plans.reply(seen) or mailboxes.NOBODY).request_id
