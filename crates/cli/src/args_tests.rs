//! The command line: what each flag becomes, what is refused, and the tables of
//! docs/coming-from-docker.md.

use super::*;
use kip_types::api::{LeftOpen, RunRequest};
use kip_types::name::MAX_NAME;
use kip_types::spec::{Image, Limits, ProcClass, Spec, Timing, TreeAccess};

fn run_request(words: &[&str]) -> RunRequest {
    match Cli::read(["kip", "run"].iter().chain(words)).unwrap().command {
        Command::Run { args, .. } => args.into_request().unwrap(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_image_s_command_is_arguments() {
    let request = run_request(&["--image", "host:5000/team/web:1", "-P", "--entrypoint", "/x", "--", "-a", "b"]);
    assert_eq!((request.spec.name.as_str(), request.spec.command), ("web", vec!["-a".to_owned(), "b".to_owned()]));
    let Image::Oci(image) = request.spec.image else { panic!("no image") };
    assert_eq!((image.publish_all, image.entrypoint), (true, Some(vec!["/x".to_owned()])));
    assert!(run_request(&["--image", "web"]).spec.command.is_empty());
}

#[test]
fn the_first_word_is_an_image_unless_dashes_come_before_it() {
    let image = |words: &[&str]| match run_request(words).spec {
        Spec { image: Image::Oci(image), command, .. } => (Some(image.reference), command.join(" ")),
        Spec { command, .. } => (None, command.join(" ")),
    };
    for (words, reference, command) in [
        (&["nginx"][..], Some("nginx"), ""),
        (&["-p", "80", "redis", "--port", "7000", "-v"], Some("redis"), "--port 7000 -v"),
        (&["debian", "sh", "-c", "x", "--json"], Some("debian"), "sh -c x --json"),
        (&["debian", "--", "sh", "--", "x"], Some("debian"), "sh -- x"),
        (&["--image", "debian", "sh"], Some("debian"), "sh"),
        (&["--image", "debian", "--", "-x", "--"], Some("debian"), "-x --"),
        (&["--image", "debian", "--", "--", "x"], Some("debian"), "-- x"),
        (&["--", "sh", "sh"], None, "sh sh"),
        (&["--name", "x", "--", "sh", "--", "x"], None, "sh -- x"),
    ] {
        assert_eq!(image(words), (reference.map(str::to_owned), command.to_owned()), "{words:?}");
    }
    assert_eq!(run_request(&["--entrypoint", "/x", "team/web:1"]).spec.name.as_str(), "web");
}

#[test]
fn docker_s_short_flags_are_kip_s() {
    let words = "-p 8080:80 -e A=b -e PATH -v ./x:/x -w /srv -u www -m 64m -l team=shop -l alone --init --hostname front \
        --add-host db:192.0.2.7 --restart unless-stopped --ulimit nofile=64:128 --stop-timeout 3 --publish 81 --pids-limit 7 -- x";
    let spec = run_request(&words.split_whitespace().collect::<Vec<_>>()).spec;
    assert_eq!((spec.ports[0].host_port, spec.ports[1].port), (Some(8080), 81));
    assert_eq!((spec.env["A"].as_str(), &spec.env["PATH"]), ("b", &std::env::var("PATH").unwrap()));
    let here = std::env::current_dir().unwrap();
    assert_eq!(spec.volumes[0].to_string(), format!("{}/x:/x", here.display()));
    assert_eq!((spec.workdir, spec.user.as_deref()), (Some("/srv".into()), Some("www")));
    assert_eq!((spec.limits.memory_bytes, spec.limits.pids), (Some(64 << 20), 7));
    assert_eq!((spec.labels["team"].as_str(), spec.labels["alone"].as_str()), ("shop", ""));
    assert_eq!((spec.hostname.as_deref(), spec.extra_hosts[0].to_string()), (Some("front"), "db:192.0.2.7".into()));
    assert_eq!(spec.ulimits[0].to_string(), "nofile=64:128");
    assert_eq!((spec.restart, spec.stop_grace_ms), (kip_types::Restart::Always, Some(3000)));
}

#[test]
fn the_command_line_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn the_working_set_may_come_by_faults_alone() {
    assert!(run_request(&["--", "true"]).spec.timing.prefetch);
    assert!(run_request(&["--prefetch", "on", "--", "true"]).spec.timing.prefetch);
    assert!(!run_request(&["--prefetch", "off", "--", "true"]).spec.timing.prefetch);
}

// promise command-line: flags and what is left to the daemon
// held by: this, `kip_cli::args::tests::what_is_not_said_is_left_to_the_daemon`
#[test]
fn run_takes_every_flag() {
    let request = run_request(&[
        "--name",
        "web",
        "--tar",
        "/x.tar",
        "--port",
        "8080:80",
        "--port",
        "53/udp",
        "-v",
        "/srv/x:/data:ro",
        "--volume",
        "db:/db",
        "--mem",
        "64M",
        "--disk",
        "1G",
        "--log-size",
        "1M",
        "--log-files",
        "5",
        "--cpus",
        "0.5",
        "--pids",
        "7",
        "--env",
        "A=b=c",
        "--env",
        "E=",
        "--workdir",
        "/srv",
        "--idle",
        "2s",
        "--park-after",
        "500ms",
        "--tick",
        "1m",
        "--never-sleep",
        "--allow-setuid",
        "--tree",
        "read",
        "--wait-ready",
        "--",
        "sh",
        "-c",
        "x",
        "--json",
        "--",
    ]);
    let spec = &request.spec;
    assert_eq!(spec.command, ["sh", "-c", "x", "--json", "--"]);
    assert_eq!((spec.ports[0].host_port, spec.ports[1].port), (Some(8080), 53));
    assert_eq!(spec.volumes, ["/srv/x:/data:ro", "db:/db"].map(|v| v.parse().unwrap()));
    assert_eq!((spec.env["A"].as_str(), spec.env["E"].as_str()), ("b=c", ""));
    assert_eq!(
        spec.timing,
        Timing { idle_ms: 2000, park_after_ms: 500, tick_ms: 60_000, never: true, ..Timing::default() }
    );
    assert_eq!(
        spec.limits,
        Limits {
            memory_bytes: Some(64 << 20),
            cpus: Some(0.5),
            pids: 7,
            disk_bytes: Some(1 << 30),
            log_bytes: 1 << 20,
            log_files: 5,
            class: ProcClass::Lc,
        }
    );
    assert_eq!(spec.image, Image::Tar("/x.tar".into()));
    assert!(request.wait_ready && spec.allow_setuid);
    assert_eq!((spec.tree, run_request(&["x"]).spec.tree), (TreeAccess::Read, TreeAccess::None));
    assert_eq!(request.left_open, LeftOpen { archive_after: true, ..LeftOpen::default() });
}

#[test]
fn what_is_not_said_is_left_to_the_daemon() {
    let request = run_request(&["--", "/usr/bin/Python3.11", "-m", "http.server"]);
    assert_eq!(request.spec.name.as_str(), "python3-11");
    assert_eq!(request.left_open, LeftOpen { name: true, idle: true, park_after: true, archive_after: true });
    assert_eq!(run_request(&["--", "./_"]).spec.name.as_str(), "proc");
    let long = "x".repeat(100);
    assert_eq!(run_request(&["--", &long]).spec.name.as_str().len(), MAX_NAME - 20);
    assert!(run_request(&["--tar", "x.tar", "--", "x"]).spec.image != Image::Tar("x.tar".into()));
}

#[test]
fn global_flags_go_anywhere_and_execs_arguments_are_its_own() {
    let cli = Cli::try_parse_from(["kip", "exec", "web", "--json", "--data", "/d", "--", "ls", "--json"]).unwrap();
    assert!(cli.json && cli.data == Some("/d".into()));
    let Command::Exec(args) = cli.command else { panic!() };
    assert_eq!(args.command, ["ls", "--json"]);
    let cli = Cli::try_parse_from(["kip", "exec", "web", "ls", "--json", "-la"]).unwrap();
    let Command::Exec(args) = cli.command else { panic!() };
    assert!(!cli.json);
    assert_eq!(args.command, ["ls", "--json", "-la"]);
}

#[test]
fn usage_is_checked() {
    for words in [
        &["run"][..],
        &["run", "--tar", "x.tar", "sh"],
        &["run", "--init"],
        &["run", "--ulimit", "nofile", "--", "x"],
        &["run", "--hostname", "-x", "--", "x"],
        &["run", "--add-host", "db", "--", "x"],
        &["run", "-l", "=x", "--", "x"],
        &["run", "--"],
        &["run", "--port", "70000", "--", "x"],
        &["run", "--name", "Not_A_Name", "--", "x"],
        &["run", "--env", "A", "--", "x"],
        &["run", "--mem", "much", "--", "x"],
        &["run", "-v", "data", "--", "x"],
        &["run", "-v", "data/x:/data", "--", "x"],
        &["volume", "rm"],
        &["volume", "rm", "../x"],
        &["run", "--image", "debian", "--tar", "x.tar"],
        &["run", "--entrypoint", "/bin/sh", "--", "x"],
        &["run", "-P", "--", "x"],
        &["run", "--image", "debian", "--pull", "often"],
        &["image", "pull"],
        &["image", "pull", "/etc"],
        &["image", "load", "oci:"],
        &["up", "--archive-after", "soon"],
        &["up", "--memory", "much"],
        &["up", "--disk", "much", "--store", "/s"],
        &["up", "--memory-high", "101"],
        &["up", "--memory-high", "0"],
        &["up", "--memory-low", "-1"],
        &["up", "--memory-low", "80M"],
        &["sleep", "web", "--to", "hot"],
        &["exec", "web"],
        &["wake", "web", "--id", "xyz"],
        &["inspect"],
        &["inspect", "web", "--files", "--env"],
        &["key"],
        &["key", "destroy"],
        &["key", "export", "f", "--key-file", "a", "--passphrase-file", "b"],
        &["key", "export", "f", "--passphrase", "a"],
        &["top", "-d", "0"],
        &["top", "-d", "soon"],
        &["top", "web"],
        &["logs", "web", "--tail", "-1"],
        &["up", "--listen", "nowhere"],
        &["up", "--listen", "127.0.0.1:0"],
        &["up", "--listen", "127.0.0.1:0", "--tls-cert", "c"],
        &["up", "--listen", "127.0.0.1:0", "--listen-plain", "--tls-cert", "c", "--tls-key", "k"],
        &["--data", "/d", "--host", "https://h:1", "ps"],
        &["token", "create", "a", "--scope", "much"],
        &["events", "--since", "x"],
        &["events", "--filter", "x=y"],
        &["ps", "--filter", "web"],
        &["ps", "--format", "{{.Nothing}}"],
        &["ps", "-q", "--format", "json"],
        &["ps", "web"],
        &["port"],
        &["port", "web", "x"],
        &["kill"],
        &["restart"],
        &["logs", "web", "--since", "soon"],
        &["logs", "web", "-f", "--until", "1m"],
        &["dance"],
        &[],
    ] {
        let error = Cli::read(["kip"].iter().chain(words)).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{words:?}");
    }
}

const FROM_DOCKER: &str = include_str!("../../../docs/coming-from-docker.md");

// promise command-line: what docs/coming-from-docker.md has of Kip's command lines are command
//   lines of Kip
#[test]
fn the_lines_beside_docker_s_are_kip_s() {
    let cells = |line: &str| line.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
    let rows: Vec<_> = FROM_DOCKER.lines().filter(|line| line.starts_with("| `")).map(cells).collect();
    assert!(rows.len() > 45, "{}", rows.len());
    for row in rows {
        let [docker, kip, _differs] = &row[..] else { panic!("a row has three cells: {row:?}") };
        assert!(docker.starts_with("`docker ") && docker.ends_with('`'), "{row:?}");
        let words = shlex::split(kip.trim_matches('`')).expect("closed quotes");
        assert_eq!(words[0], "kip", "{row:?}");
        let read = Cli::read(&words).unwrap_or_else(|e| panic!("{kip}: {e}"));
        // What the words become is checked as far as it can be without a daemon; the file is none
        // of this directory.
        if let Command::Run { mut args, .. } = read.command {
            args.life.env_files.clear();
            let request = args.into_request().unwrap_or_else(|e| panic!("{kip}: {e:#}"));
            assert!(matches!(request.spec.image, Image::Oci(_)), "{kip}");
        }
    }
}
