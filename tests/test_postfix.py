"""postfix, with all its processes: mail that is sent while it is parked is delivered to a local mailbox."""

from __future__ import annotations

import smtplib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import servers
from harness.clients import send_mail
from harness.kip import Kip, Proc
from harness.wait import wait_for

CYCLES = 20


@pytest.fixture(scope="module")
def postfix(module_kip: Kip, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proc]:
    server = servers.postfix()
    tar = server.tarball(tmp_path_factory.mktemp("tar"))
    proc = module_kip.run("postfix", server.command, ports=server.published, tar=tar, flags=server.flags)
    yield proc
    proc.remove()


def mailbox(proc: Proc) -> str:
    return proc.exec("cat", "/var/mail/alice", check=False).stdout


def wait_delivered(proc: Proc, token: str) -> None:
    try:
        wait_for(f"the mail {token} is in the mailbox", lambda: token in mailbox(proc), 90, every=0.1)
    except AssertionError as error:
        log = proc.exec("sh", "-c", "tail -n 30 /var/log/mail/postfix.log; postqueue -p", check=False)
        raise AssertionError(f"{error}\n{log.stdout}{log.stderr}\n{proc.logs()[-2000:]}") from error


def cycles(postfix: Proc, count: int, sleep: Callable[[Proc], object] = Proc.sleep) -> None:
    """Each mail wakes it. It is put to sleep again as soon as the mail is accepted, in whatever state its queue then is, so
    that deliveries begin in one run and end in another."""
    port = postfix.port(25)
    tokens = [f"token-{sleep.__name__}-{count}-{i}-end" for i in range(count)]
    for token in tokens:
        sleep(postfix)
        send_mail(port, "alice@kip.test", token)
        view = postfix.wait_state("running")
        assert view["last_wake"]["trigger"].startswith("tcp") or sleep is not Proc.sleep
        assert sleep is not Proc.sleep or postfix.rebuilt()
    for token in tokens:
        wait_delivered(postfix, token)
    text = mailbox(postfix)
    for token in tokens:
        assert text.count(token) == 1, f"{token} was delivered {text.count(token)} times"
    assert "Mail queue is empty" in postfix.exec("postqueue", "-p").stdout


# promise waking: postfix wakes natively, with all its sockets in its queue directory
# held by: this, `tests/test_postfix.py::test_session_lives_through_a_sleep`
# promise servers: postfix: a mail sent while parked is delivered once
# held by: this, `tests/test_postfix.py::test_twenty_cycles`
def test_mail_wakes_and_is_delivered(postfix: Proc) -> None:
    postfix.sleep()
    send_mail(postfix.port(25), "alice@kip.test", "the first mail")
    postfix.wait_state("running")
    assert postfix.rebuilt()
    wait_delivered(postfix, "the first mail")
    owner = postfix.exec("stat", "-c", "%U %a", "/var/mail/alice").stdout.split()
    assert owner == ["alice", "600"], "the local delivery agent took on the identity of the recipient"


# promise P2: many processes
# held by: this, `tests/test_web.py::test_workers_of_nginx`
def test_twenty_cycles(postfix: Proc) -> None:
    cycles(postfix, CYCLES)


def hibernate_anyhow(postfix: Proc) -> None:
    """It may be awake again before this returns: deliveries go on."""
    postfix.hibernate_once()


@pytest.mark.parametrize("way", ["blocked", "held"])
def test_hibernated(kip: Kip, tmp_path: Path, way: str) -> None:
    """All its processes in place, their memory paged out, in the middle of deliveries too; quiescent, parked from there."""
    server = servers.postfix()
    tar, flags = server.tarball(tmp_path), [*server.flags, "--hibernate", way]
    postfix = kip.run(f"postfix-{way}", server.command, ports=server.published, tar=tar, flags=flags)
    full = postfix.inspect()["memory"]["pss_bytes"]
    cycles(postfix, CYCLES // 2, hibernate_anyhow)
    view = postfix.hold() if way == "held" else postfix.hibernate()
    assert view["last_sleep"]["held"] == (way == "held")
    assert view["memory"]["pss_bytes"] < full / 2, (full, view)
    postfix.sleep()
    postfix.wake()
    cycles(postfix, 3, hibernate_anyhow)


@pytest.mark.parametrize("to_sleep", [Proc.sleep, Proc.hibernate], ids=["parked", "hibernated"])
def test_session_lives_through_a_sleep(postfix: Proc, to_sleep: Callable[[Proc], object]) -> None:
    """A client in the middle of its SMTP session notices nothing."""
    token = f"twice-{to_sleep.__name__}"
    with smtplib.SMTP("127.0.0.1", postfix.port(25), local_hostname="client.test", timeout=60) as smtp:
        assert smtp.ehlo()[0] == 250
        to_sleep(postfix)
        assert smtp.mail("sender@client.test")[0] == 250
        assert smtp.rcpt("alice@kip.test")[0] == 250
        to_sleep(postfix)
        assert smtp.data(f"Subject: x\r\n\r\n{token}\r\n")[0] == 250
    wait_delivered(postfix, token)


def test_setgid_program_inside(postfix: Proc) -> None:
    """sendmail hands mail to the setgid program postdrop, also when an unprivileged user inside sends it."""
    user = "setpriv --reuid=1000 --regid=1000 --clear-groups"
    command = f"printf 'Subject: x\\n\\nfrom-inside\\n' | {user} sendmail alice@kip.test"
    postfix.exec("sh", "-c", command, timeout=60)
    postfix.sleep()
    postfix.wake()
    wait_delivered(postfix, "from-inside")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_three_hundred_cycles(postfix: Proc) -> None:
    cycles(postfix, 300)
