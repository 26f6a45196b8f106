"""The service as a thread (quick, shared) and as a process (can be killed)."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import uvicorn
from pydantic import SecretStr

from app.http.protocol import Protocol
from app.main import create_app
from app.settings import Settings

ROOT = Path(__file__).parents[1]
_START_SECONDS = 30


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServiceThread:
    """A real server in a thread, with an event loop of its own."""

    def __init__(self, settings: Settings, *, maintenance: bool = True) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            create_app(settings, maintenance=maintenance),
            http=Protocol,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=5,
            backlog=4096,
        )
        self.server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self.server.run, args=([self._socket],), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        _wait_until_live(self.url)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def waiting_polls(self) -> int:
        """How many long polls wait in this service."""
        return int(self.server.lifespan.state["runtime"].work.dispatcher.waiting)

    def stop(self) -> None:
        """As a SIGTERM would."""
        self.server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server did not stop"


class ServiceProcess:
    """`python -m app serve` in a process group of its own."""

    def __init__(self, settings: Settings, log: Path, *options: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._options = options
        self._environment = {
            **os.environ,
            **{
                f"TOWPATH_{name.upper()}": str(value.get_secret_value() if isinstance(value, SecretStr) else value)
                for name, value in settings
                if value is not None
            },
        }
        self.start()

    def start(self) -> None:
        """Start it (again), on the same port, and wait until it answers."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "app", "serve", "--port", str(self.port), *self._options],
                cwd=ROOT,
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        _wait_until_live(self.url, self._process)

    def kill(self) -> None:
        """SIGKILL, to all of it."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def terminate(self, timeout: float = 20) -> int:
        """SIGTERM; returns the exit status."""
        self._process.terminate()
        return self._process.wait(timeout)


def _wait_until_live(url: str, process: "subprocess.Popen[bytes] | None" = None) -> None:
    give_up_at = time.monotonic() + _START_SECONDS
    while time.monotonic() < give_up_at:
        assert process is None or process.poll() is None, f"the service ended with {process.returncode}"
        try:
            if httpx.get(f"{url}/livez", timeout=2).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            time.sleep(0.02)
    raise AssertionError(f"nothing answers at {url}")
