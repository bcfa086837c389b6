"""postfix, with all its processes: mail that is sent while it is parked is delivered to a local mailbox."""

from __future__ import annotations

import smtplib
from collections.abc import Iterator

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


def cycles(postfix: Proc, count: int) -> None:
    """Each mail wakes it. It is parked again as soon as the mail is accepted, in whatever state its queue then is, so
    that deliveries begin in one run and end in another."""
    port = postfix.port(25)
    tokens = [f"token-{count}-{i}-end" for i in range(count)]
    for token in tokens:
        postfix.sleep()
        send_mail(port, "alice@kip.test", token)
        assert postfix.wait_state("running")["last_wake"]["trigger"].startswith("tcp")
    for token in tokens:
        wait_delivered(postfix, token)
    text = mailbox(postfix)
    for token in tokens:
        assert text.count(token) == 1, f"{token} was delivered {text.count(token)} times"
    assert "Mail queue is empty" in postfix.exec("postqueue", "-p").stdout


def test_mail_wakes_and_is_delivered(postfix: Proc) -> None:
    postfix.sleep()
    send_mail(postfix.port(25), "alice@kip.test", "the first mail")
    wait_delivered(postfix, "the first mail")
    owner = postfix.exec("stat", "-c", "%U %a", "/var/mail/alice").stdout.split()
    assert owner == ["alice", "600"], "the local delivery agent took on the identity of the recipient"


def test_twenty_cycles(postfix: Proc) -> None:
    cycles(postfix, CYCLES)


def test_session_lives_through_a_sleep(postfix: Proc) -> None:
    """A client in the middle of its SMTP session notices nothing."""
    with smtplib.SMTP("127.0.0.1", postfix.port(25), local_hostname="client.test", timeout=60) as smtp:
        assert smtp.ehlo()[0] == 250
        postfix.sleep()
        assert smtp.mail("sender@client.test")[0] == 250
        assert smtp.rcpt("alice@kip.test")[0] == 250
        postfix.sleep()
        assert smtp.data("Subject: x\r\n\r\nslept twice\r\n")[0] == 250
    wait_delivered(postfix, "slept twice")


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
