"""Translates errors of the API server to `StoreFailed`, with the namespace and a hint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kubelend.core.errors import Forbidden, KubelendError, NotFound, StoreFailed
from kubelend.kube import answers
from kubelend.stores.records import Damaged


@contextmanager
def translated(server: str, namespace: str) -> Iterator[None]:
    """Errors that mean "this store cannot be used" become `StoreFailed`."""
    try:
        yield
    except StoreFailed:
        raise
    except Damaged as error:
        raise _failure(server, namespace, f"it is damaged: {error}", _RESTORE) from error
    except KubelendError as error:
        raise _failure(server, namespace, error.message, _hint(error, namespace)) from error


def taken_over() -> StoreFailed:
    return StoreFailed(
        "another broker has written to the store since",
        hint="another broker is the writer now; only one may use a store",
    )


def head_gone() -> StoreFailed:
    return StoreFailed("LedgerRecord head was deleted", hint=_RESTORE)


_RESTORE = "restore the object from a backup; only the broker may edit its records"


def _failure(server: str, namespace: str, what: str, hint: str) -> StoreFailed:
    where = f"namespace {namespace} of {server}"
    return StoreFailed(f"the store in {where} cannot be used: {what}", hint=hint)


def _hint(error: KubelendError, namespace: str) -> str:
    match error:
        case NotFound() if not answers.is_missing_object(error):
            return "install the CRDs: kubectl apply -f deploy/crds"
        case NotFound():
            return f"create the namespace: kubectl create namespace {namespace}"
        case Forbidden() if not error.hint:
            return "check the Role of the broker's account"
    return error.hint
