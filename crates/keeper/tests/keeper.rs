//! The keeper as a process: started, filled, attacked and killed. Needs no privileges.

mod home;

use home::{BINARY, Home, SOON, kill};
use kip_keeper::protocol::{KeeperAnswer, KeeperRefusal, KeeperRequest, MAX_MESSAGE, MAX_PART, Select};
use kip_keeper::resident::RunError;
use kip_keeper::run_directory::RunDirectory;
use kip_keeper::{Keeper, KeeperError, Presence, StartError};
use kip_sys::fdpass;
use kip_sys::process::{Signal, pidfd_send_signal, same_open_file_here, wait_for_end};
use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

impl Home {
    /// A connection without the client's care.
    fn raw(&self) -> OwnedFd {
        RunDirectory::open(self.path(), "keeper").unwrap().connect(SOON).unwrap()
    }
}

fn ask(socket: &OwnedFd, request: &KeeperRequest, fds: &[BorrowedFd<'_>]) -> KeeperAnswer {
    fdpass::send(socket.as_fd(), &serde_json::to_vec(request).unwrap(), fds).unwrap();
    hear(socket)
}

fn hear(socket: &OwnedFd) -> KeeperAnswer {
    let (bytes, _) = fdpass::recv(socket.as_fd(), MAX_MESSAGE).unwrap();
    serde_json::from_slice(&bytes).unwrap()
}

fn put(names: &[&str], more: bool) -> KeeperRequest {
    KeeperRequest::Put { names: names.iter().map(|n| (*n).to_owned()).collect(), more, clear: None }
}

/// Waits for the condition; fails when it does not come true.
fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + SOON;
    while !condition() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The read end reports end of file only when every copy of the write end is closed.
fn assert_all_closed(reader: OwnedFd) {
    let mut reader = File::from(reader);
    assert_eq!(reader.read(&mut [0; 1]).unwrap(), 0, "every write end is closed");
}

#[test]
fn descriptors_are_put_got_listed_renamed_and_dropped() {
    let home = Home::new();
    let keeper = home.keeper();
    assert_eq!(keeper.found(), Presence::Started);
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let null = File::open("/dev/null").unwrap();
    keeper.put("web/pipe", &[reader.as_fd(), writer.as_fd()]).unwrap();
    keeper.put("web/netns", &[null.as_fd()]).unwrap();
    keeper.put("db/netns", &[null.as_fd()]).unwrap();
    assert_eq!(keeper.list("web/").unwrap(), [("web/netns".to_owned(), 1), ("web/pipe".to_owned(), 2)]);

    let got = keeper.get("web/pipe").unwrap();
    assert_eq!(got.len(), 2);
    assert!(same_open_file_here(got[0].as_fd(), reader.as_fd()).unwrap());
    assert!(same_open_file_here(got[1].as_fd(), writer.as_fd()).unwrap());

    assert!(matches!(keeper.rename_prefix("web/", "db/"), Err(KeeperError::Taken(_))));
    assert_eq!(keeper.rename_prefix("web/", "www/").unwrap(), 2);
    assert!(matches!(keeper.get("web/pipe"), Err(KeeperError::Unknown { .. })));
    let all: Vec<_> = keeper.get_prefix("").unwrap().into_iter().map(|(name, _)| name).collect();
    assert_eq!(all, ["db/netns", "www/netns", "www/pipe", "www/pipe"]);

    keeper.replace_prefix("www/", [("www/netns", null.as_fd())]).unwrap();
    assert_eq!(keeper.list("").unwrap().len(), 2);
    drop((got, writer));
    assert_all_closed(reader);

    assert!(keeper.drop_name("db/netns").unwrap());
    assert!(!keeper.drop_name("db/netns").unwrap());
    assert_eq!(keeper.drop_prefix("www/").unwrap(), 1);
    let status = keeper.ping().unwrap();
    assert_eq!((status.pid, status.names, status.descriptors), (keeper.pid(), 0, 0));
    assert!(matches!(keeper.put("x", &[]), Err(KeeperError::Nothing { .. })));
    assert!(matches!(keeper.put("not a name", &[null.as_fd()]), Err(KeeperError::BadName(_))));
}

#[test]
fn a_thousand_descriptors_go_in_and_come_out() {
    let home = Home::new();
    let keeper = home.keeper();
    let files: Vec<(String, File)> = (0..1000)
        .map(|i| {
            let path = home.path().join(i.to_string());
            std::fs::write(&path, i.to_string()).unwrap();
            (format!("many/{i:04}"), File::open(path).unwrap())
        })
        .collect();
    keeper.put_many(files.iter().map(|(n, f)| (n, f.as_fd()))).unwrap();
    assert_eq!(keeper.list("many/").unwrap().len(), 1000);
    let back = keeper.get_prefix("many/").unwrap();
    assert_eq!(back.len(), 1000);
    for ((name, file), (got_name, got)) in files.iter().zip(&back) {
        assert_eq!(name, got_name);
        assert!(same_open_file_here(file.as_fd(), got.as_fd()).unwrap());
    }
    // Twice as many under the same prefix replace them in one step.
    let twice = files.iter().chain(&files).map(|(n, f)| (n, f.as_fd()));
    keeper.replace_prefix("many/", twice).unwrap();
    assert_eq!(keeper.ping().unwrap().descriptors, 2000);
    assert_eq!(keeper.drop_prefix("many/").unwrap(), 1000);
    assert_eq!(keeper.ping().unwrap().descriptors, 0);
}

#[test]
fn a_killed_keeper_is_noticed_and_replaced() {
    let home = Home::new();
    let keeper = home.keeper();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    keeper.put("web/sock/1", &[listener.as_fd()]).unwrap();
    let (first, watch) = (keeper.pid(), keeper.watch_fd().unwrap());
    assert!(!wait_for_end(watch.as_fd(), Some(Duration::ZERO)).unwrap());
    kill(&keeper);
    assert!(wait_for_end(watch.as_fd(), Some(Duration::ZERO)).unwrap());
    assert!(matches!(keeper.ping(), Err(KeeperError::Gone { .. })));
    assert!(matches!(keeper.get("web/sock/1"), Err(KeeperError::Gone { .. })));

    assert_eq!(keeper.respawn().unwrap(), Presence::Started);
    assert_ne!(keeper.pid(), first);
    assert_eq!(keeper.list("").unwrap(), []);
    // What it held lives on in the daemon, which puts it again.
    keeper.put("web/sock/1", &[listener.as_fd()]).unwrap();
    TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let fresh = keeper.watch_fd().unwrap();
    assert!(!wait_for_end(fresh.as_fd(), Some(Duration::ZERO)).unwrap());
    // A second time nothing is started, and nothing has to be put again.
    assert_eq!(keeper.respawn().unwrap(), Presence::Running);
    assert_eq!(keeper.list("").unwrap().len(), 1);
}

#[test]
fn a_restarted_daemon_finds_everything() {
    let home = Home::new();
    let null = File::open("/dev/null").unwrap();
    let first = home.keeper();
    first.put("a", &[null.as_fd()]).unwrap();
    let pid = first.pid();
    drop(first);
    let second = home.keeper();
    assert_eq!((second.found(), second.pid()), (Presence::Running, pid));
    assert!(same_open_file_here(second.get("a").unwrap()[0].as_fd(), null.as_fd()).unwrap());
}

#[test]
fn two_daemons_share_one_keeper_and_starts_do_not_race() {
    for _ in 0..5 {
        let home = Home::new();
        let keepers: Vec<Keeper> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..6).map(|_| scope.spawn(|| home.keeper())).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        let pid = keepers[0].pid();
        let null = File::open("/dev/null").unwrap();
        for (index, keeper) in keepers.iter().enumerate() {
            assert_eq!(keeper.pid(), pid);
            keeper.put(&format!("from/{index}"), &[null.as_fd()]).unwrap();
        }
        assert_eq!(keepers[5].list("from/").unwrap().len(), 6);
        let locked = std::fs::read_to_string(home.path().join("run/keeper.lock")).unwrap();
        assert_eq!(locked.trim(), pid.to_string());
    }
}

#[test]
fn a_race_to_replace_a_killed_keeper_has_one_winner() {
    let home = Home::new();
    let keepers: Vec<Keeper> = (0..4).map(|_| home.keeper()).collect();
    let first = keepers[0].pid();
    for _ in 0..5 {
        kill(&keepers[0]);
        std::thread::scope(|scope| {
            for keeper in &keepers {
                scope.spawn(|| assert_eq!(keeper.respawn().unwrap(), Presence::Started));
            }
        });
        assert!(keepers.iter().all(|k| k.pid() == keepers[0].pid()));
    }
    assert_ne!(keepers[0].pid(), first);
}

#[test]
fn only_quit_ends_it() {
    let home = Home::new();
    let keeper = home.keeper();
    let null = File::open("/dev/null").unwrap();
    keeper.put("a", &[null.as_fd()]).unwrap();
    let watch = keeper.watch_fd().unwrap();
    for signal in [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT, Signal::USR1, Signal::ALARM, Signal::PIPE] {
        pidfd_send_signal(watch.as_fd(), signal).unwrap();
    }
    assert_eq!(keeper.list("").unwrap().len(), 1);
    keeper.quit().unwrap();
    assert!(wait_for_end(watch.as_fd(), Some(Duration::ZERO)).unwrap());
    assert!(!home.path().join("run/keeper.sock").exists());
    assert!(matches!(keeper.ping(), Err(KeeperError::Gone { .. })));
    assert!(Keeper::connect(Path::new(BINARY), home.path()).unwrap().is_none());
    assert_eq!(home.keeper().found(), Presence::Started);
}

// promise recovery: the keeper does a request wholly or not at all; nothing a client sends ends it
// held by: this, `crates/keeper/tests/keeper.rs::malformed_messages_are_refused_and_do_no_harm`
#[test]
fn a_client_that_dies_in_the_middle_changes_nothing() {
    let home = Home::new();
    let keeper = home.keeper();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let dying = home.raw();
    assert_eq!(ask(&dying, &put(&["half/1", "half/2"], true), &[writer.as_fd(); 2]), KeeperAnswer::Done { count: 0 });
    assert_eq!(keeper.list("").unwrap(), []);
    // And another one that dies with its message in the socket, unread by the keeper or not.
    let other = home.raw();
    let request = serde_json::to_vec(&put(&["half/3"], true)).unwrap();
    fdpass::send(other.as_fd(), &request, &[writer.as_fd()]).unwrap();
    drop((dying, other, writer));
    assert_all_closed(reader);
    assert_eq!(keeper.list("").unwrap(), []);
}

#[test]
fn malformed_messages_are_refused_and_do_no_harm() {
    let home = Home::new();
    let keeper = home.keeper();
    let null = File::open("/dev/null").unwrap();
    keeper.put("kept", &[null.as_fd()]).unwrap();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let socket = home.raw();
    let refused = |answer: KeeperAnswer| {
        assert!(matches!(answer, KeeperAnswer::Refused { code: KeeperRefusal::Malformed, .. }), "{answer:?}");
    };
    let garbage: [&[u8]; 6] =
        [b"\0", b"\xff\xfe", b"{", b"{\"op\":\"explode\"}", b"{\"op\":\"put\",\"names\":7}", &vec![b'['; MAX_MESSAGE]];
    for bytes in garbage {
        fdpass::send(socket.as_fd(), bytes, &[writer.as_fd()]).unwrap();
        refused(hear(&socket));
    }
    fdpass::send(socket.as_fd(), &vec![b' '; MAX_MESSAGE + 1], &[writer.as_fd()]).unwrap();
    refused(hear(&socket));
    refused(ask(&socket, &put(&["one", "two"], false), &[writer.as_fd()]));
    refused(ask(&socket, &put(&["bad name"], false), &[writer.as_fd()]));
    refused(ask(&socket, &KeeperRequest::Ping, &[writer.as_fd()]));
    refused(ask(&socket, &KeeperRequest::Rename { from: "k".to_owned(), to: "\n".to_owned() }, &[]));
    // A refusal in the middle of a put undoes what was staged.
    ask(&socket, &put(&["staged"], true), &[writer.as_fd()]);
    refused(ask(&socket, &put(&["bad name"], false), &[writer.as_fd()]));
    // A next without a get is the end of nothing.
    assert_eq!(ask(&socket, &KeeperRequest::Next, &[]), KeeperAnswer::Fds { names: vec![], more: false });
    assert_eq!(ask(&socket, &put(&[], false), &[]), KeeperAnswer::Done { count: 0 });

    assert_eq!(keeper.list("").unwrap(), [("kept".to_owned(), 1)]);
    drop(writer);
    assert_all_closed(reader);
}

#[test]
fn a_client_that_does_not_read_is_cut_off() {
    let home = Home::new();
    let keeper = home.keeper();
    let socket = home.raw();
    let ping = serde_json::to_vec(&KeeperRequest::Ping).unwrap();
    let sent = (0..1_000_000).take_while(|_| fdpass::send(socket.as_fd(), &ping, &[]).is_ok()).count();
    assert!(sent < 1_000_000, "it was never cut off");
    assert!(keeper.ping().is_ok());
}

#[test]
fn too_many_clients_are_cut_off_and_the_others_served() {
    let home = Home::new();
    let keeper = home.keeper();
    let crowd: Vec<OwnedFd> = (0..50).map(|_| home.raw()).collect();
    let ping = serde_json::to_vec(&KeeperRequest::Ping).unwrap();
    let served = |socket: &OwnedFd| {
        fdpass::send(socket.as_fd(), &ping, &[]).is_ok() && fdpass::recv(socket.as_fd(), MAX_MESSAGE).is_ok()
    };
    assert_eq!(crowd.iter().filter(|s| served(s)).count(), kip_keeper::server::MAX_CLIENTS - 1);
    assert!(keeper.ping().is_ok());
    drop(crowd);
    until("room for new clients", || served(&home.raw()));
}

#[test]
fn a_full_keeper_says_so_and_keeps_what_it_has() {
    let home = Home::new();
    let wrapper = home.wrapped("ulimit -Sn 64; ulimit -Hn 128");
    let keeper = Keeper::connect_or_spawn(&wrapper, home.path()).unwrap();
    let null = File::open("/dev/null").unwrap();
    let limit = keeper.ping().unwrap().limit;
    assert!((64..128).contains(&limit), "raised from soft to hard, less what it needs itself: {limit}");
    keeper.put_many((0..limit).map(|i| (format!("a/{i}"), null.as_fd()))).unwrap();
    // One more, some more than its table has room for, and more than the whole limit in parts.
    for extra in [1, 200, 600] {
        let error = keeper.put_many((0..extra).map(|i| (format!("b/{i}"), null.as_fd()))).unwrap_err();
        let KeeperError::Full(message) = error else { panic!("{error:?}") };
        assert!(message.contains(&format!("holds {limit} descriptors, limit {limit}")), "{message}");
    }
    assert_eq!((keeper.list("a/").unwrap().len(), keeper.list("b/").unwrap().len()), (limit, 0));
    assert!(home.raw().as_fd().try_clone_to_owned().is_ok());
    assert!(matches!(ask(&home.raw(), &KeeperRequest::Ping, &[]), KeeperAnswer::Status(_)), "still accepts clients");
    assert!(keeper.drop_name("a/0").unwrap());
    keeper.put("b/0", &[null.as_fd()]).unwrap();
}

#[test]
fn sockets_live_on_in_it() {
    let home = Home::new();
    let keeper = home.keeper();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mut early = TcpStream::connect(address).unwrap();
    let (server_side, _) = listener.accept().unwrap();
    keeper.put_many([("p/listen", listener.as_fd()), ("p/conn", server_side.as_fd())]).unwrap();
    drop((listener, server_side, keeper));
    // No process but the keeper has them now. Both the old connection and a new one queue their
    // bytes.
    early.write_all(b"old").unwrap();
    let mut late = TcpStream::connect(address).unwrap();
    late.write_all(b"new").unwrap();

    let keeper = home.keeper();
    let taken = TcpListener::from(keeper.get("p/listen").unwrap().pop().unwrap());
    let mut old = TcpStream::from(keeper.get("p/conn").unwrap().pop().unwrap());
    assert_eq!(keeper.drop_prefix("p/").unwrap(), 2);
    let mut bytes = [0; 3];
    old.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"old");
    let (mut new, _) = taken.accept().unwrap();
    new.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"new");
    // With the keeper's duplicate dropped a close is a close again.
    drop(old);
    assert_eq!(early.read(&mut bytes).unwrap(), 0);
}

#[test]
fn a_lingering_socket_does_not_hold_it_up() {
    let home = Home::new();
    let keeper = home.keeper();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    // Fill both buffers: the peer does not read, so a close with SO_LINGER waits for all of its
    // time.
    client.set_nonblocking(true).unwrap();
    while (&client).write(&[0; 65536]).is_ok() {}
    rustix::net::sockopt::set_socket_linger(&client, Some(Duration::from_secs(60))).unwrap();
    keeper.put("linger", &[client.as_fd()]).unwrap();
    // The keeper's is the last one then.
    drop(client);
    let start = Instant::now();
    assert!(keeper.drop_name("linger").unwrap());
    assert!(keeper.ping().is_ok());
    assert!(start.elapsed() < Duration::from_secs(5), "it waited for the peer");
    drop(peer);
}

#[test]
fn it_is_detached_and_small_and_holds_nothing_else() {
    let home = Home::new();
    let fifo = home.path().join("inherited");
    std::fs::write(&fifo, "").unwrap();
    let wrapper = home.wrapped(&format!("exec 7<{0} 9<{0}", fifo.display()));
    let keeper = Keeper::connect_or_spawn(&wrapper, home.path()).unwrap();
    let proc = PathBuf::from(format!("/proc/{}", keeper.pid()));
    let opened: Vec<String> = std::fs::read_dir(proc.join("fd"))
        .unwrap()
        .map(|e| std::fs::read_link(e.unwrap().path()).unwrap().display().to_string())
        .collect();
    assert!(!opened.iter().any(|o| o.ends_with("inherited")), "{opened:?}");
    assert!(opened.len() <= 7, "three streams, directory, lock, listener, client: {opened:?}");
    assert_eq!(std::fs::read_link(proc.join("cwd")).unwrap(), Path::new("/"));
    let stat = std::fs::read_to_string(proc.join("stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    assert_ne!(fields[1], std::process::id().to_string(), "not our child");
    assert_eq!(fields[3], keeper.pid().to_string(), "leads its own session");
    let mode = std::fs::metadata(home.path().join("run/keeper.sock")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);

    let null = File::open("/dev/null").unwrap();
    keeper.put_many((0..1000).map(|i| (format!("proc-{i}/netns"), null.as_fd()))).unwrap();
    let rollup = std::fs::read_to_string(proc.join("smaps_rollup")).unwrap();
    let kb = |key: &str| -> u64 {
        let line = rollup.lines().find_map(|l| l.strip_prefix(key)).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    };
    println!("keeper with 1000 descriptors: PSS {} kB, RSS {} kB, locked {} kB", kb("Pss:"), kb("Rss:"), kb("Locked:"));
    // The unoptimized program is several times as large on disk.
    let limit = if cfg!(debug_assertions) { 4096 } else { 1536 };
    assert!(kb("Pss:") < limit, "{rollup}");
    let status = keeper.ping().unwrap();
    assert_eq!(status.memory_locked, kb("Locked:") > 0);
    let score = std::fs::read_to_string(proc.join("oom_score_adj")).unwrap();
    assert_eq!(status.oom_protected, score.trim() == "-900");
}

#[test]
fn a_deep_data_directory_is_no_obstacle() {
    let home = Home::new();
    let deep = home.path().join("d".repeat(100)).join("e".repeat(100));
    std::fs::create_dir_all(&deep).unwrap();
    let keeper = Keeper::connect_or_spawn(Path::new(BINARY), &deep).unwrap();
    assert!(deep.join("run/keeper.sock").exists());
    keeper.quit().unwrap();
}

#[test]
fn failures_to_start_are_explained() {
    let home = Home::new();
    let error = Keeper::connect_or_spawn(Path::new("/nonexistent/keeper"), home.path()).unwrap_err();
    assert!(matches!(error, StartError::Run(RunError::Run { .. })), "{error}");
    let wrapper = home.wrapped("echo out of luck >&2; exit 3");
    let error = Keeper::connect_or_spawn(&wrapper, home.path()).unwrap_err();
    assert!(error.to_string().contains("out of luck"), "{error}");
    let error = Keeper::connect_or_spawn(Path::new(BINARY), &home.path().join("missing")).unwrap_err();
    assert!(error.to_string().contains("missing/run"), "{error}");
    // Something that cannot be replaced lies where the socket belongs.
    std::fs::create_dir_all(home.path().join("run/keeper.sock/x")).unwrap();
    let error = Keeper::connect_or_spawn(Path::new(BINARY), home.path()).unwrap_err();
    assert!(matches!(error, StartError::Run(RunError::Failed { .. }) | StartError::Connect { .. }), "{error}");
    std::fs::remove_dir_all(home.path().join("run/keeper.sock")).unwrap();
}

#[test]
fn a_stopped_keeper_does_not_hang_its_clients_for_ever() {
    let home = Home::new();
    let keeper = home.keeper();
    let watch = keeper.watch_fd().unwrap();
    pidfd_send_signal(watch.as_fd(), Signal::STOP).unwrap();
    let start = Instant::now();
    assert!(matches!(keeper.ping(), Err(KeeperError::Stuck)));
    assert!(start.elapsed() < Duration::from_secs(30));
    pidfd_send_signal(watch.as_fd(), Signal::CONT).unwrap();
    assert_eq!(keeper.respawn().unwrap(), Presence::Running);
    assert!(keeper.ping().is_ok());
}

#[test]
fn a_snapshot_is_of_one_moment() {
    let home = Home::new();
    let keeper = home.keeper();
    let null = File::open("/dev/null").unwrap();
    keeper.put_many((0..300).map(|i| (format!("a/{i:03}"), null.as_fd()))).unwrap();
    let slow = home.raw();
    let select = Select::Prefix("a/".to_owned());
    let KeeperAnswer::Fds { names, more: true } = ask(&slow, &KeeperRequest::Get { select }, &[]) else {
        panic!("a first part")
    };
    keeper.drop_prefix("a/").unwrap();
    let KeeperAnswer::Fds { names: rest, more: false } = ask(&slow, &KeeperRequest::Next, &[]) else {
        panic!("a last part")
    };
    assert_eq!(names.len() + rest.len(), 300);
}

#[test]
fn a_keeper_of_another_protocol_is_superseded_with_all_it_holds() {
    let home = Home::new();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let many = 2 * MAX_PART + 1;
    let old = home.keeper();
    old.put_many((0..many).map(|n| (format!("web/{n:04}"), writer.as_fd()))).unwrap();
    let (binary, pid) = (Path::new(BINARY), old.pid());
    assert!(!Keeper::is_foreign(home.path()).unwrap(), "it speaks this protocol");
    assert_eq!(Keeper::supersede(binary, home.path()).unwrap(), Some(many));
    let new = home.keeper();
    assert_ne!(new.pid(), pid);
    assert!(matches!(old.ping(), Err(KeeperError::Gone { .. })));
    assert_eq!(new.found(), Presence::Running);
    assert_eq!(new.list("").unwrap().len(), many);
    let held = new.get("web/0002").unwrap();
    assert!(same_open_file_here(held[0].as_fd(), writer.as_fd()).unwrap());
    drop((held, writer));
    new.quit().unwrap();
    assert_all_closed(reader);
    assert!(Keeper::supersede(binary, home.path()).unwrap().is_none(), "there is none");
}

#[test]
fn a_renewed_keeper_is_there_for_whoever_asks_meanwhile() {
    let home = Home::new();
    let keeper = home.keeper();
    let (null, pid) = (File::open("/dev/null").unwrap(), keeper.pid());
    keeper.put("web/old", &[null.as_fd()]).unwrap();
    let (over, asked) = (std::sync::atomic::AtomicBool::new(false), std::sync::atomic::AtomicUsize::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(std::sync::atomic::Ordering::SeqCst) {
                keeper.put("web/new", &[null.as_fd()]).unwrap();
                asked.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            }
        });
        let more = |n: usize| until("it is asked", || asked.load(std::sync::atomic::Ordering::SeqCst) > n);
        more(10);
        keeper.renew().unwrap();
        more(asked.load(std::sync::atomic::Ordering::SeqCst) + 10);
        over.store(true, std::sync::atomic::Ordering::SeqCst);
    });
    assert_ne!(keeper.pid(), pid);
    assert_eq!(keeper.list("").unwrap(), [("web/new".to_owned(), 1), ("web/old".to_owned(), 1)]);
}
