//! What a program finds inside a sandbox, seen from inside. Kernel test: needs root.

mod harness;

use harness::{Place, UID_BASE, wait_for};
use kip_sandbox::init::{InitRecord, StartStep};
use kip_types::lifecycle::Exit;
use rustix::io::Errno;
use std::io::Read as _;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

// promise P14: namespaces, ids, capabilities, seccomp
// held by: this, `tests/test_sandbox.py::test_red_team_gets_nothing`
#[test]
fn ids_capabilities_and_filters_are_as_promised() {
    let (out, exit) = Place::new().sh(
        "id -u; id -g; id -G; cat /proc/self/uid_map /proc/self/gid_map; \
         grep -E '^(Cap|NoNewPrivs|Seccomp:|Groups)' /proc/1/status /proc/self/status; hostname; echo $HOSTNAME $HOME $PWD",
    );
    assert_eq!(exit, Exit::Code(0), "{out}");
    let words: Vec<_> = out.split_whitespace().collect();
    assert_eq!(words[..3], ["0", "0", "0"], "{out}");
    assert_eq!(words[3..9], ["0", &UID_BASE.to_string(), "65536", "0", &UID_BASE.to_string(), "65536"]);
    let mut lines = 0;
    for line in out.lines().filter(|l| l.starts_with("/proc/")) {
        let (_, line) = line.split_once(':').unwrap();
        let (key, value) = line.split_once(":\t").unwrap();
        // chown dac_override fowner fsetid kill setgid setuid setpcap net_bind_service sys_chroot
        // audit_write setfcap
        let wanted = match key {
            "CapEff" | "CapPrm" | "CapBnd" => "00000000a00405fb",
            "CapInh" | "CapAmb" => "0000000000000000",
            "NoNewPrivs" => "1",
            "Seccomp" => "2",
            "Groups" => "",
            other => panic!("{other}"),
        };
        assert_eq!(value.trim(), wanted, "{line}");
        lines += 1;
    }
    assert_eq!(lines, 16, "{out}");
    assert!(out.ends_with("boxed\nboxed /root /\n"), "{out}");
}

// promise sandbox: nothing of the host is to be seen but the allowlist
// held by: this, `kip_sandbox::base::tests::only_public_files_on_the_list_are_copied`
#[test]
fn nothing_of_the_host_is_to_be_seen() {
    let secret = tempfile::NamedTempFile::new().unwrap();
    let place = Place::new();
    let data = place.dir.path().display().to_string();
    let script = format!(
        "for f in /etc/gshadow /etc/ssh /etc/sudoers /etc/ssl/private {data} {data}/base {secret} /sys/kernel /sys/fs; do \
         test -e $f && echo SEEN $f; done; grep -q '[$]' /etc/shadow && echo SEEN hashes; \
         ls -A /root /home /tmp /opt /sys /srv /boot 2>/dev/null; echo LISTED; ls / ; echo ROOT; ls -d /proc/[0-9]* ; \
         echo MOUNTS; cat /proc/self/mountinfo",
        secret = secret.path().display()
    );
    let (out, exit) = place.sh(&script);
    assert_eq!(exit, Exit::Code(0), "{out}");
    assert!(!out.contains("SEEN"), "{out}");
    let (listed, rest) = out.split_once("LISTED").unwrap();
    let empty = ["/root:", "/home:", "/tmp:", "/opt:", "/sys:", "/srv:"];
    assert!(listed.lines().all(|l| l.is_empty() || empty.contains(&l)), "{listed}");
    let (root, rest) = rest.split_once("ROOT").unwrap();
    let names: Vec<_> = root.split_whitespace().collect();
    for hidden in ["boot", "work", "lost+found", "old_root"] {
        assert!(!names.contains(&hidden), "{root}");
    }
    let (pids, mounts) = rest.split_once("MOUNTS").unwrap();
    assert!(pids.split_whitespace().all(|p| ["/proc/1", "/proc/2", "/proc/3"].contains(&p)), "{pids}");
    assert!(!mounts.contains(&data) && !mounts.contains("tmpfs /"), "no path or filesystem of the host: {mounts}");
}

// promise sandbox: user, pid, mount, uts, ipc and network namespaces; few mounts, none in the
//   host's namespace
#[test]
fn mounts_are_few_and_can_be_checkpointed() {
    let before = harness::host_mounts();
    let place = Place::new();
    let mut running = place.start(&["/bin/sh", "-c", "echo up; exec sleep 1000"]);
    running.wait_for_line("up");
    let mounts = std::fs::read_to_string(format!("/proc/{}/mountinfo", running.started.init_pid)).unwrap();
    let at: Vec<_> = mounts.lines().map(|l| l.split(' ').nth(4).unwrap()).collect();
    let masked = kip_sandbox::launch::MASKED.iter().filter(|p| std::path::Path::new(p).exists());
    let mut wanted = vec!["/", "/usr", "/proc"];
    wanted.extend(masked);
    assert_eq!(at, wanted, "{mounts}");
    for line in mounts.lines().filter(|l| l.contains(" overlay ")) {
        assert!(line.contains("index=on") && line.contains("nfs_export=on"), "{line}");
        assert!(line.split(" - ").nth(1).unwrap().contains(" rw,"), "{line}");
        assert!(line.split(' ').nth(5).unwrap().starts_with("rw"), "{line}");
        assert!(!line.contains("shared:") && !line.contains("master:"), "{line}");
    }
    assert_eq!(harness::host_mounts(), before, "nothing appears in the host's namespace");
    // Pid 1 is small: a page of text, a stack, nothing else of its own.
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", running.started.init_pid)).unwrap();
    let own: Vec<_> = maps.lines().filter(|l| !l.contains("[v")).collect();
    assert_eq!(own.len(), 2, "{maps}");
    running.kill();
}

#[test]
fn files_belong_to_the_block_and_stay() {
    let place = Place::new();
    let (out, exit) = place.sh(
        "stat -c '%u %n' / /usr /bin/sh /etc/passwd /tmp; echo mine > /srv/file && chown 33:44 /srv/file; \
         echo x > /usr/local/made && mv /usr/share/doc /usr/share/docs && rm /etc/profile; cat /etc/hostname; \
         grep -c boxed /etc/hosts; head -c 4 /dev/urandom | wc -c; echo gone > /dev/null; touch /usr/bin/env; ls -d /usr/share/docs",
    );
    assert_eq!(exit, Exit::Code(0), "{out}");
    assert_eq!(out, "0 /\n0 /usr\n0 /bin/sh\n0 /etc/passwd\n0 /tmp\nboxed\n2\n4\n/usr/share/docs\n");
    let upper = place.spec.dir.join("upper");
    let file = std::fs::metadata(upper.join("root/srv/file")).unwrap();
    assert_eq!((file.uid(), file.gid()), (UID_BASE + 33, UID_BASE + 44));
    assert!(upper.join("usr/local/made").exists());
    assert!(std::path::Path::new("/usr/share/doc").exists());
    // The same files, started again.
    let (out, _) = place.sh("cat /srv/file /usr/local/made; test -e /etc/profile || echo removed");
    assert_eq!(out, "mine\nx\nremoved\n");
}

#[test]
fn dangerous_calls_are_refused() {
    let script = r#"
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def call(name, nr, *args):
    ctypes.set_errno(0)
    r = libc.syscall(nr, *args)
    print(name, 'ok' if r >= 0 else os.strerror(ctypes.get_errno()).replace(' ', '-'))
call('io_uring', 425, 8, 0)
call('mount', 165, b'none', b'/mnt', b'tmpfs', 0, 0)
call('unshare', 272, 0x10000000)
call('unshare_fs', 272, 0x200)
call('setns', 308, 0, 0)
call('bpf', 321, 0, 0, 0)
call('userfaultfd', 323, 0)
call('keyctl', 250, 0, 0)
call('perf', 298, 0, 0, -1, -1, 0)
call('clone_newuser', 56, 0x10000011, 0, 0, 0, 0)
call('clone3', 435, 0, 0)
for family in (socket.AF_VSOCK, socket.AF_ALG, socket.AF_PACKET):
    try: socket.socket(family, socket.SOCK_RAW); print('socket', family.name, 'ok')
    except OSError as e: print('socket', family.name, os.strerror(e.errno).replace(' ', '-'))
try: os.mknod('/tmp/mem', 0o20666, os.makedev(1, 1)); print('mknod ok')
except OSError as e: print('mknod', os.strerror(e.errno).replace(' ', '-'))
try: open('/proc/sys/kernel/core_pattern', 'w'); print('sysctl ok')
except OSError as e: print('sysctl', os.strerror(e.errno).replace(' ', '-'))
try: os.chroot('/usr'); print('chroot ok')
except OSError as e: print('chroot', e)
"#;
    let (out, exit) = Place::new().start(&["python3", "-c", script]).finish();
    assert_eq!(exit, Exit::Code(0), "{out}");
    let refused = "Operation-not-permitted";
    let wanted = format!(
        "io_uring {refused}\nmount {refused}\nunshare {refused}\nunshare_fs ok\nsetns {refused}\nbpf {refused}\n\
         userfaultfd {refused}\nkeyctl {refused}\nperf {refused}\nclone_newuser {refused}\nclone3 Function-not-implemented\n\
         socket AF_VSOCK {refused}\nsocket AF_ALG {refused}\nsocket AF_PACKET {refused}\nmknod {refused}\n\
         sysctl Permission-denied\nchroot ok\n"
    );
    assert_eq!(out, wanted);
}

// promise sandbox: masked paths of /proc
#[test]
fn masked_paths_are_empty() {
    let paths = kip_sandbox::launch::MASKED.join(" ");
    let (out, _) = Place::new().sh(&format!("for p in {paths}; do test -e $p && stat -c '%F' $p && wc -c < $p; done"));
    assert!(out.lines().count() >= 4, "{out}");
    assert!(out.lines().all(|l| l == "character special file" || l == "0"), "{out}");
}

#[test]
fn setuid_programs_work_only_where_wanted() {
    let script = "cp /usr/bin/id /srv/id && chown 1000 /srv/id && chmod 4755 /srv/id && \
                  setpriv --reuid 33 --regid 33 --clear-groups /srv/id -u";
    let mut place = Place::new();
    assert_eq!(place.sh(script).0, "33\n");
    place.allow_setuid = true;
    assert_eq!(place.sh(script).0, "1000\n");
    assert_eq!(place.sh("grep -E '^(NoNewPrivs|Seccomp):' /proc/self/status").0, "NoNewPrivs:\t0\nSeccomp:\t2\n");
}

#[test]
fn orphans_are_reaped_and_the_program_s_end_is_told() {
    let place = Place::new();
    let script = "for i in 1 2 3 4 5; do (sleep 0.01 & ) ; done; n=0; \
                  while [ $n -lt 100 ] && cat /proc/[0-9]*/stat 2>/dev/null | grep -q '(sleep)'; do \
                  n=$((n+1)); sleep 0.1; done; cat /proc/[0-9]*/stat 2>/dev/null | grep -c ' Z '; exit 7";
    let (out, exit) = place.sh(script);
    assert_eq!((out.as_str(), exit), ("0\n", Exit::Code(7)));
    assert_eq!(place.sh("kill -9 $$").1, Exit::Signal(9));
    // The program's end is the end of every process.
    let (_, exit) = place.sh("sleep 1000 >/dev/null 2>&1 & exit 3");
    assert_eq!(exit, Exit::Code(3));
    wait_for("an empty cgroup", || place.cgroup.pids().unwrap().is_empty().then_some(()));
}

#[test]
fn signals_and_sessions_are_as_after_a_login() {
    let (out, _) = Place::new().sh("grep -E '^Sig(Blk|Ign)' /proc/self/status /proc/1/status; cut -d' ' -f 1-2,4-7 /proc/$$/stat /proc/1/stat; ls -l /proc/self/fd /proc/1/fd; umask");
    for line in out.lines().filter(|l| l.contains("Sig")) {
        assert!(line.ends_with("\t0000000000000000"), "{out}");
    }
    let stat: Vec<_> = out.lines().filter(|l| l.contains(" (")).collect();
    assert!(stat[0].starts_with("2 (sh) 1 2 2 0"), "the leader of its own session: {out}");
    assert!(stat[1].starts_with("1 (init) 0 1 1 0"), "{out}");
    let fds: Vec<_> = out.lines().filter(|l| l.contains(" -> ") && !l.contains("/proc/")).collect();
    assert_eq!(fds.len(), 7, "stdio of both, and init's status pipe: {out}");
    assert_eq!(fds.iter().filter(|l| l.ends_with("0 -> /dev/null")).count(), 2, "{out}");
    assert!(out.ends_with("0022\n"), "{out}");
}

#[test]
fn a_missing_command_or_directory_is_reported() {
    let place = Place::new();
    let record_of = |command: &str, workdir| {
        let mut running = place.try_start(place.mounts(), &[command], workdir).unwrap();
        let record = running.record().unwrap();
        assert_eq!(running.record(), None);
        record
    };
    let errno = Errno::NOENT.raw_os_error();
    assert_eq!(record_of("no-such-program", None), InitRecord::NotStarted { step: StartStep::Exec, errno });
    assert_eq!(record_of("/etc/none", None), InitRecord::NotStarted { step: StartStep::Exec, errno });
    assert_eq!(record_of("ls", Some("/none")), InitRecord::NotStarted { step: StartStep::WorkDir, errno });
    let errno = Errno::ACCESS.raw_os_error();
    assert_eq!(record_of("/etc/passwd", None), InitRecord::NotStarted { step: StartStep::Exec, errno });
}

#[test]
fn a_program_that_is_only_execd_does_not_run() {
    let mut place = Place::new();
    place.exec_only = true;
    let record_of = |command: &[&str], workdir| {
        let mut running = place.try_start(place.mounts(), command, workdir).unwrap();
        (running.record().unwrap(), running.record(), running)
    };
    let (record, more, mut sandbox) = record_of(&["sh", "-c", "echo ran"], None);
    assert!(matches!(record, InitRecord::Running { .. }), "{record:?}");
    let mut said = String::new();
    sandbox.stdout.read_to_string(&mut said).unwrap();
    assert_eq!((more, said.as_str()), (None, ""), "it is gone, and has said nothing");
    let errno = Errno::NOENT.raw_os_error();
    assert_eq!(record_of(&["no-such-program"], None).0, InitRecord::NotStarted { step: StartStep::Exec, errno });
    assert_eq!(record_of(&["ls"], Some("/none")).0, InitRecord::NotStarted { step: StartStep::WorkDir, errno });
}

#[test]
fn exec_joins_the_sandbox_and_reports_how_it_ended() {
    let place = Place::new();
    let mut running = place.start(&["/bin/sh", "-c", "echo 1 > /tmp/here; echo up; exec sleep 1000"]);
    running.wait_for_line("up");
    let (out, exit) = place
        .exec(
            &running,
            &[
                "sh",
                "-c",
                "cat /tmp/here; id -u; hostname; cat /proc/1/comm; pwd; \
               grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status; readlink /proc/1/ns/*  > /tmp/a; \
               readlink /proc/self/ns/* > /tmp/b; cmp /tmp/a /tmp/b && echo same; ls /proc/self/fd | wc -l; exit 42",
            ],
        )
        .unwrap();
    assert_eq!(
        out,
        "1\n0\nboxed\ninit\n/\nCapEff:\t00000000a00405fb\nCapBnd:\t00000000a00405fb\nNoNewPrivs:\t1\nSeccomp:\t2\nsame\n4\n"
    );
    assert_eq!(exit, Exit::Code(42));
    assert_eq!(place.exec(&running, &["sh", "-c", "kill -15 $$"]).unwrap().1, Exit::Signal(15));
    let error = place.exec(&running, &["no-such-program"]).unwrap_err();
    assert!(error.is_missing_command(), "{error}");
    let error = place.exec(&running, &["/etc/passwd"]).unwrap_err();
    assert!(!error.is_missing_command() && error.to_string().contains("denied"), "{error}");
    // The launcher is back in its own pid namespace.
    let second = Place::new();
    assert_eq!(second.sh("exit 5").1, Exit::Code(5));
    assert_eq!(place.exec(&running, &["true"]).unwrap().1, Exit::Code(0));
    running.kill();
    let ended = second.start(&["true"]);
    kip_sys::process::wait_for_end(ended.started.pidfd.as_fd(), None).unwrap();
    let error = place.exec(&ended, &["true"]).unwrap_err();
    assert!(error.to_string().contains("enter the namespaces"), "{error}");
}

#[test]
fn mounts_can_be_had_again_while_and_after_it_runs() {
    let place = Place::new();
    let kept = place.mounts();
    let mut running = place
        .start_on(kept.duplicate().unwrap(), &["/bin/sh", "-c", "echo kept > /srv/kept; echo up; exec sleep 1000"]);
    running.wait_for_line("up");
    let busy = place.spec.mount(&place.launcher, place.namespaces.user.as_fd()).unwrap_err();
    assert!(matches!(busy, kip_sandbox::rootfs::RootfsError::InUse { .. }), "{busy:?}");
    running.kill();
    for _ in 0..3 {
        assert_eq!(place.start_on(kept.duplicate().unwrap(), &["cat", "/srv/kept"]).finish().0, "kept\n");
    }
}

#[test]
fn a_tarball_and_pins_lie_over_the_base() {
    let mut place = Place::new();
    let tar = place.dir.path().join("image.tar");
    let mut builder = tar::Builder::new(std::fs::File::create(&tar).unwrap());
    for (name, mode) in [("etc/app.conf", 0o600), ("bin/app", 0o755), ("etc/issue", 0o644)] {
        let mut header = tar::Header::new_gnu();
        header.set_mode(mode);
        header.set_size(17);
        header.set_uid(0);
        header.set_gid(0);
        builder.append_data(&mut header, name, &b"#!/bin/sh\necho hi"[..]).unwrap();
    }
    builder.finish().unwrap();
    let layer = place.spec.dir.join("layer");
    std::fs::create_dir_all(&place.spec.dir).unwrap();
    kip_sandbox::archive::unpack(&tar, &layer, &Default::default()).unwrap();
    place.spec.layer = Some(layer);
    let pins = place.dir.path().join("pins");
    std::fs::create_dir_all(pins.join("usr/bin")).unwrap();
    std::fs::create_dir_all(pins.join("root/etc")).unwrap();
    std::fs::copy("/bin/false", pins.join("usr/bin/true")).unwrap();
    std::fs::write(pins.join("root/etc/issue"), "pinned\n").unwrap();
    place.spec.pins = Some(pins);
    let (out, exit) =
        place.sh("app; ls -d /bin/sh /etc/passwd; stat -c '%u %a' /etc/app.conf; cat /etc/issue; /bin/true");
    assert_eq!((out.as_str(), exit), ("hi\n/bin/sh\n/etc/passwd\n0 600\npinned\n", Exit::Code(1)));
}

#[test]
fn another_base_is_refused_until_the_old_one_is_forgotten() {
    let mut place = Place::new();
    place.sh("echo kept > /srv/kept; mv /usr/share/doc /usr/share/docs");
    let other = place.dir.path().join("other");
    assert!(std::process::Command::new("cp").arg("-a").arg(&place.spec.base).arg(&other).status().unwrap().success());
    place.spec.base = other;
    let error = place.spec.mount(&place.launcher, place.namespaces.user.as_fd()).unwrap_err();
    assert!(matches!(error, kip_sandbox::rootfs::RootfsError::BaseChanged { .. }), "{error:?}");
    place.spec.forget_base().unwrap();
    assert_eq!(place.sh("cat /srv/kept; ls -d /usr/share/docs").0, "kept\n/usr/share/docs\n");
}

#[test]
fn a_tenant_s_tricks_with_its_own_files_do_not_reach_further() {
    let place = Place::new();
    place.sh("rm /dev/null; ln -s /etc/hostname /dev/null");
    let error = place.try_start(place.mounts(), &["true"], None).err().expect("a null device is needed").to_string();
    assert!(error.contains("/dev/null"), "{error}");
}
