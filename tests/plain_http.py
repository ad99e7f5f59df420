"""httpx for servers on 127.0.0.1, without TLS.

Each client of httpx reads all root certificates, which takes 40 ms of CPU time (httpx 0.28).
"""

from __future__ import annotations

import ssl
from functools import partial

import httpx

_NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

get = partial(httpx.get, verify=_NO_CERTIFICATES)
post = partial(httpx.post, verify=_NO_CERTIFICATES)
request = partial(httpx.request, verify=_NO_CERTIFICATES)
client = partial(httpx.Client, verify=_NO_CERTIFICATES)
