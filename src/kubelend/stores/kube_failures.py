"""Translates errors of the API server to `StoreFailed`, with the namespace and a hint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kubelend.core.errors import Forbidden, KubelendError, NotFound, StoreFailed
from kubelend.kube import answers
from kubelend.stores.records import CorruptRecord


@contextmanager
def translate_api_errors(server: str, namespace: str) -> Iterator[None]:
    """Errors that mean "this store cannot be used" become `StoreFailed`."""
    try:
        yield
    except StoreFailed:
        raise
    except CorruptRecord as error:
        raise _store_failure(
            server, namespace, f"it is damaged: {error}", _RESTORE_OBJECT_HINT
        ) from error
    except KubelendError as error:
        raise _store_failure(
            server, namespace, error.message, _error_hint(error, namespace)
        ) from error


def fenced_error() -> StoreFailed:
    return StoreFailed(
        "another broker has written to the store since",
        hint="another broker is the writer now; only one may use a store",
    )


def head_deleted_error() -> StoreFailed:
    return StoreFailed("LedgerRecord head was deleted", hint=_RESTORE_OBJECT_HINT)


_RESTORE_OBJECT_HINT = "restore the object from a backup; only the broker may edit its records"


def _store_failure(server: str, namespace: str, problem: str, hint: str) -> StoreFailed:
    where = f"namespace {namespace} of {server}"
    return StoreFailed(f"the store in {where} cannot be used: {problem}", hint=hint)


def _error_hint(error: KubelendError, namespace: str) -> str:
    match error:
        case NotFound() if not answers.is_object_not_found(error):
            return "install the CRDs: kubectl apply -f deploy/crds"
        case NotFound():
            return f"create the namespace: kubectl create namespace {namespace}"
        case Forbidden() if not error.hint:
            return "check the Role of the broker's account"
    return error.hint
