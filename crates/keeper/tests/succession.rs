//! A keeper takes another's place: whichever process dies in the middle of that, nothing is lost.

mod home;

use home::{BINARY, Home, SOON, kill};
use kip_keeper::protocol::{MAX_MESSAGE, MAX_PART};
use kip_keeper::run_directory::RunDirectory;
use kip_keeper::{Keeper, Presence, StartError};
use kip_sys::fdpass;
use kip_sys::process::wait_for_end;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;

#[test]
fn one_of_another_protocol_is_told_from_ours() {
    let home = Home::new();
    assert!(!Keeper::is_foreign(home.path()).unwrap(), "there is none");
    let place = RunDirectory::open(home.path(), "keeper").unwrap();
    let listener = place.bind().unwrap();
    rustix::io::ioctl_fionbio(&listener, false).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let client = rustix::net::accept(&listener).unwrap();
            fdpass::recv(client.as_fd(), MAX_MESSAGE).unwrap();
            fdpass::send(client.as_fd(), br#"{"re":"status","pid":1,"protocol":999,"more":[]}"#, &[]).unwrap();
        });
        assert!(Keeper::is_foreign(home.path()).unwrap());
    });
}

#[test]
fn a_successor_takes_everything_by_itself() {
    let home = Home::new();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let old = home.keeper();
    let pid = old.pid();
    let many = MAX_PART + 1;
    old.put_many((0..many).map(|n| (format!("web/{n:04}"), writer.as_fd()))).unwrap();
    // From here on no process but the keepers has the pipe, as when the daemon is killed.
    drop((old, writer));
    let turn = RunDirectory::open(home.path(), "keeper").unwrap().turn().unwrap();
    kip_keeper::resident::run_in_place(Path::new(BINARY), home.path(), turn).unwrap();
    let new = home.keeper();
    assert_ne!(new.pid(), pid);
    assert_eq!(new.found(), Presence::Running);
    assert_eq!(new.list("").unwrap().len(), many);
    let held = new.get("web/0000").unwrap();
    rustix::io::write(&held[0], b"still open").unwrap();
    let mut heard = [0; 10];
    rustix::io::read(&reader, &mut heard).unwrap();
    assert_eq!(&heard, b"still open");
}

#[test]
fn whoever_fails_in_the_middle_of_a_succession_loses_nothing() {
    let home = Home::new();
    let null = File::open("/dev/null").unwrap();
    let old = home.keeper();
    old.put("web/a", &[null.as_fd()]).unwrap();
    // The new one does not start: all is as it was.
    let fails = home.wrapped("exit 3");
    assert!(matches!(Keeper::supersede(&fails, home.path()).unwrap_err(), StartError::Run(_)));
    assert_eq!(old.list("").unwrap(), [("web/a".to_owned(), 1)]);
    // Both the old and the new one are gone, and another does not start at once: we still have it.
    let once = home.path().join("once");
    let (pid, once) = (old.pid(), once.display());
    let dies = home.wrapped(&format!(
        "[ \"$2\" = --in-place ] && kill -9 {pid} && exit 4\n[ -e {once} ] || {{ touch {once}; exit 5; }}"
    ));
    assert_eq!(Keeper::supersede(&dies, home.path()).unwrap(), Some(1));
    let new = home.keeper();
    assert_ne!(new.pid(), pid);
    assert_eq!(new.list("").unwrap(), [("web/a".to_owned(), 1)]);
}

#[test]
fn nobody_comes_in_between_two_keepers() {
    let home = Home::new();
    let null = File::open("/dev/null").unwrap();
    let old = home.keeper();
    old.put("web/a", &[null.as_fd()]).unwrap();
    let watch = old.watch_fd().unwrap();
    let turn = RunDirectory::open(home.path(), "keeper").unwrap().turn().unwrap();
    kill(&old);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| home.keeper().pid());
        assert!(wait_for_end(watch.as_fd(), Some(SOON)).unwrap());
        // The successor's part is ours here: another keeper that wants to serve meanwhile has to
        // wait.
        let lock = RunDirectory::open(home.path(), "keeper").unwrap().lock().expect("nobody else takes it");
        assert!(!other.is_finished());
        drop((lock, turn));
        other.join().unwrap();
    });
}
