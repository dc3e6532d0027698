"""Who gets in and who does not, over real sockets, on asyncio's loop and on uvloop."""

import asyncio
import contextlib
import ssl
import subprocess
import warnings

import pytest
import uvloop

from certificates import Certificates
from kubelend.core.errors import InvalidSettings
from kubelend.kits import keyfiles
from kubelend.pki import files, profiles
from kubelend.pki.authority import Authority
from kubelend.pki.profiles import Profile
from kubelend.transports import tls

...
