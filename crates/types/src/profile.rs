//! Profiles: programs that are known to bear a sleep in which their own clock, CLOCK_MONOTONIC,
//! stands.
//!
//! Each entry has a test in `tests/test_profiles.py`, which parks that program for some seconds
//! with its clock standing, and checks that it serves what it served before, new connections, and
//! its periodic work afterwards. A program without such a test is not in the table. A program is
//! recognised by the file that it executes; a program of an interpreter also by its first
//! arguments. Every process of a proc has to be of the one profile, or do nothing but wait for
//! others ([`NEUTRAL`]).

use schemars::JsonSchema;
use serde::Serialize;

/// Goes up with every change of [`PROFILES`].
pub const VERSION: u32 = 1;

/// Programs beside those of a profile that have no timers of their own: they start others and wait
/// for them.
const NEUTRAL: [&str; 4] = ["kip-init", "dash", "tini", "dumb-init"];

/// A program, or programs that work together, known to bear a suspended sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
pub struct Profile {
    /// Its name.
    pub name: &'static str,
    /// Files that its processes execute, the ends of their paths; `*` stands for any name. A
    /// version at the end of a file's own name does not count: `python3.11` is `python`.
    pub programs: &'static [&'static str],
    /// The first arguments after options of one letter, of a program of an interpreter; empty for
    /// any.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub arguments: &'static [&'static str],
}

/// One process of a proc.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// The path of the file that it executes.
    pub program: String,
    /// Its arguments, its own name first.
    pub arguments: Vec<String>,
}

const fn program(name: &'static str, programs: &'static [&'static str]) -> Profile {
    Profile { name, programs, arguments: &[] }
}

/// The table.
pub const PROFILES: &[Profile] = &[
    program("apache2", &["apache2"]),
    program("beanstalkd", &["beanstalkd"]),
    program("dnsmasq", &["dnsmasq"]),
    program("docker-registry", &["docker-registry"]),
    program("haproxy", &["haproxy"]),
    program("lighttpd", &["lighttpd"]),
    program("mariadb", &["mariadbd"]),
    program("memcached", &["memcached"]),
    program("mosquitto", &["mosquitto"]),
    program("named", &["named"]),
    program("nginx", &["nginx"]),
    program("ngircd", &["ngircd"]),
    program("nsd", &["nsd"]),
    program("postfix", &["postfix/sbin/*"]),
    program("postgres", &["postgres"]),
    program("privoxy", &["privoxy"]),
    Profile { name: "python http.server", programs: &["python"], arguments: &["-m", "http.server"] },
    // Debian's redis-server is a link to the second.
    program("redis", &["redis-server", "redis-check-rdb"]),
    program("rsync", &["rsync"]),
    program("sshd", &["sshd"]),
    program("tinyproxy", &["tinyproxy"]),
    program("unbound", &["unbound"]),
    program("vsftpd", &["vsftpd"]),
];

impl Profile {
    /// Whether a process is one of this profile's.
    fn is_of(&self, process: &Process) -> bool {
        let first = process.arguments.iter().skip(1);
        let rest: Vec<_> = first.skip_while(|a| is_option(a) && self.arguments.first() != Some(&a.as_str())).collect();
        let same = rest.len() >= self.arguments.len() && self.arguments.iter().zip(&rest).all(|(a, b)| a == b);
        same && self.programs.iter().any(|ours| ends_with(&process.program, ours))
    }
}

/// One letter, or several that have no argument.
fn is_option(argument: &str) -> bool {
    argument.strip_prefix('-').is_some_and(|rest| rest.chars().all(|c| c.is_ascii_alphabetic()))
}

/// Whether a path ends with these names. Its last one may have a version.
fn ends_with(path: &str, names: &str) -> bool {
    let path = path.strip_suffix(" (deleted)").unwrap_or(path);
    let mut parts = path.rsplit('/');
    let mut names = names.rsplit('/');
    let (Some(file), Some(name)) = (parts.next(), names.next()) else { return false };
    let plain = file.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.').trim_end_matches('-');
    (name == "*" || name == file || name == plain)
        && names.all(|name| parts.next().is_some_and(|part| name == "*" || part == name))
}

/// The profile of a proc with these processes, pid 1 of the sandbox left out.
pub fn of(processes: &[Process]) -> Option<&'static Profile> {
    let neutral = |process: &&Process| NEUTRAL.iter().any(|name| ends_with(&process.program, name));
    let (_, rest): (Vec<_>, Vec<_>) = processes.iter().partition(neutral);
    let first = rest.first()?;
    PROFILES.iter().find(|profile| profile.is_of(first) && rest.iter().all(|process| profile.is_of(process)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(program: &str, arguments: &str) -> Process {
        Process { program: program.to_owned(), arguments: arguments.split(' ').map(str::to_owned).collect() }
    }

    fn named(processes: &[Process]) -> Option<&'static str> {
        of(processes).map(|profile| profile.name)
    }

    #[test]
    fn a_program_is_known_by_its_file() {
        let redis = process("/usr/bin/redis-check-rdb", "redis-server *:6379");
        assert_eq!(named(std::slice::from_ref(&redis)), Some("redis"));
        assert_eq!(
            named(&[
                process("/usr/sbin/nginx (deleted)", "nginx: master"),
                process("/usr/sbin/nginx", "nginx: worker")
            ]),
            Some("nginx")
        );
        assert_eq!(named(&[process("/usr/bin/dash", "sh -c redis-server"), redis.clone()]), Some("redis"));
        assert_eq!(named(&[process("/usr/bin/sleep", "sleep 5"), redis.clone()]), None, "not only this program");
        assert_eq!(named(&[process("/usr/sbin/nginx", "nginx"), redis]), None, "of two profiles");
        assert_eq!(named(&[process("/usr/bin/dash", "sh")]), None, "no program at all");
        assert_eq!(named(&[process("/opt/my-nginx", "nginx")]), None);
        assert_eq!(named(&[]), None);
    }

    #[test]
    fn a_program_of_an_interpreter_is_known_by_its_arguments() {
        let python = |arguments| named(&[process("/usr/bin/python3.11", arguments)]);
        let server = Some("python http.server");
        assert_eq!(python("python3 -m http.server 8000"), server);
        assert_eq!(python("python3 -u -m http.server"), server);
        assert_eq!(python("python3 -m http.server.mine"), None);
        assert_eq!(python("python3 app.py -m http.server"), None);
        assert_eq!(python("python3"), None);
        assert_eq!(named(&[process("/usr/bin/pypy3", "pypy3 -m http.server")]), None);
    }

    #[test]
    fn ends_of_paths() {
        assert!(
            ends_with("/usr/lib/postfix/sbin/qmgr", "postfix/sbin/*")
                && ends_with("/usr/lib/x/bin/postgres", "postgres")
        );
        assert!(!ends_with("/usr/sbin/qmgr", "postfix/sbin/*") && !ends_with("sbin/x", "postfix/sbin/*"));
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = PROFILES.iter().map(|p| p.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), PROFILES.len());
    }
}
