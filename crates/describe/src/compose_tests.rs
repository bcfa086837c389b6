//! Compose files: what is read of them, what is lacking, what is wrong.

use super::*;
use crate::values::Pull;
use kip_types::scale::CloneMethod;
use kip_types::spec::Image;
use kip_types::volume::ClonedVolumes;

fn parse(text: &str) -> Result<Document, Faults> {
    let lookup = |key: &str| match key {
        "TAG" => Some("7".to_owned()),
        "HOME" => Some("/home/me".to_owned()),
        _ => None,
    };
    crate::read(&Reading {
        path: Path::new("/srv/shop/compose.yaml"),
        text,
        overrides: &[],
        lookup: &lookup,
        project: None,
        profiles: &[],
    })
}

fn faults(text: &str) -> Vec<String> {
    parse(text).unwrap_err().0.iter().map(Fault::to_string).collect()
}

fn notes(text: &str) -> Vec<String> {
    parse(text).unwrap().notes.iter().map(|note| format!("{:?} {note}", note.weight)).collect()
}

const SHOP: &str = r#"
services:
  web:
    image: nginx:${TAG:-1}
    command: nginx -g 'daemon off;'
    ports: ["127.0.0.1:8080:80", "3000-3001:3000-3001/udp", {target: 443, published: "8443", host_ip: "::1"}]
    environment:
      A: ${NONE:-fallback}
      EMPTY: ""
      HOME:
    volumes:
      - ./html:/srv:ro
      - type: volume
        source: cache
        target: /cache
      - ~/.x:/x
    depends_on:
      db: {condition: service_healthy}
    links: ["db:store", "db"]
    deploy:
      resources:
        limits: {cpus: "0.5", memory: 64m, pids: 20}
    x-kip: {idle: 5s, never-sleep: true}
  db:
    image: redis
    entrypoint: ["redis-server"]
    command: ["--port", "6379"]
    environment: ["B=b=c", "N"]
    expose: [6379]
    container_name: the-db
    networks: {default: {aliases: [db.internal]}}
    mem_limit: 1gb
    storage_opt: {size: 2g}
    logging: {driver: json-file, options: {max-size: 5m, max-file: "2"}}
    stop_signal: SIGINT
    restart: unless-stopped
    stop_grace_period: 1m30s
    healthcheck: {test: [CMD, redis-cli, "get a"], interval: 1s, timeout: 1s, retries: 5}
    user: redis
    working_dir: /data
    pull_policy: never
  debug:
    image: x
    profiles: [debug]
volumes:
  cache:
"#;

// promise files: `logging` of a Compose file: `max-size` and `max-file`; what Kip's logs cannot is
//   told and taken as near as they can
// held by: this, `kip_describe::compose::tests::a_log_is_limited_as_near_as_kip_can`
#[test]
fn services_are_procs() {
    let document = parse(SHOP).unwrap();
    let [db, web] = &document.procs[..] else { panic!("{document:?}") };
    assert_eq!(document.left_out[0].as_str(), "shop-debug");
    assert_eq!([&db, &web].map(|p| p.request.spec.name.as_str()), ["the-db", "shop-web"]);
    assert_eq!(web.depends_on[0].as_str(), "the-db");
    let spec = &web.request.spec;
    let Image::Oci(image) = &spec.image else { panic!() };
    assert_eq!(image.reference, "nginx:7");
    assert_eq!(spec.command, ["nginx", "-g", "daemon off;"]);
    let ports: Vec<_> = spec.ports.iter().map(ToString::to_string).collect();
    assert_eq!(ports, ["127.0.0.1:8080:80", "3000:3000/udp", "3001:3001/udp", "[::1]:8443:443"]);
    let env: Vec<_> = spec.env.iter().map(|(k, v)| format!("{k}={v}")).collect();
    assert_eq!(env, ["A=fallback", "EMPTY=", "HOME=/home/me"]);
    let volumes: Vec<_> = spec.volumes.iter().map(ToString::to_string).collect();
    assert_eq!(volumes, ["/srv/shop/html:/srv:ro", "shop_cache:/cache", "/home/me/.x:/x"]);
    assert_eq!((spec.limits.cpus, spec.limits.memory_bytes, spec.limits.pids), (Some(0.5), Some(64 << 20), 20));
    assert_eq!((spec.timing.idle_ms, spec.timing.never), (5000, true));
    assert!(!web.request.left_open.idle && web.request.left_open.park_after);
    let spec = &db.request.spec;
    assert_eq!((spec.limits.memory_bytes, spec.limits.disk_bytes), (Some(1 << 30), Some(2 << 30)));
    assert_eq!((spec.limits.log_bytes, spec.limits.log_files), (5 << 20, 2));
    assert_eq!((spec.restart, spec.stop_grace_ms), (kip_types::life::Restart::Always, Some(90_000)));
    let ready = spec.ready.as_ref().unwrap();
    assert_eq!((ready.check.to_string().as_str(), ready.within_ms), ("exec:redis-cli 'get a'", 10_000));
    assert_eq!(spec.env.iter().next(), Some((&"B".to_owned(), &"b=c".to_owned())));
    assert_eq!((spec.env.len(), spec.ports[0].to_string().as_str()), (1, "6379,private"));
    assert_eq!((spec.network.as_deref(), spec.aliases.join(" ").as_str()), (Some("shop"), "db db.internal store"));
    assert_eq!(
        (web.request.spec.network.as_deref(), &web.request.spec.aliases[..]),
        (Some("shop"), &["web".to_owned()][..])
    );
    assert_eq!(spec.limits.memory_bytes, Some(1 << 30));
    assert_eq!(
        (spec.user.as_deref(), spec.stop_signal.as_deref(), db.pull),
        (Some("redis"), Some("SIGINT"), Pull::Never)
    );
    let Image::Oci(image) = &spec.image else { panic!() };
    assert_eq!(image.entrypoint, Some(vec!["redis-server".to_owned()]));
}

#[test]
fn a_log_is_limited_as_near_as_kip_can() {
    let read = |size: &str, files: &str| {
        let options = format!("logging: {{options: {{max-size: {size}, max-file: {files}}}}}");
        let document = parse(&format!("services:\n  web:\n    image: x\n    {options}\n")).unwrap();
        let limits = &document.procs[0].request.spec.limits;
        let told: Vec<_> = document.notes.iter().map(|note| (note.weight, note.message.as_str())).collect();
        (limits.log_bytes, limits.log_files, told.len(), format!("{told:?}"))
    };
    assert_eq!(read("64k", "16"), (64 << 10, 16, 0, "[]".to_owned()));
    let (bytes, files, told, lines) = read("10k", "\"50\"");
    assert_eq!((bytes, files, told), (64 << 10, 16, 2), "{lines}");
    assert!(
        lines.contains("max-size is not supported: files of a log have 64 KiB") && !lines.contains("Changes"),
        "{lines}"
    );
    let (bytes, files, told, lines) = read("\"-1\"", "0");
    assert_eq!((bytes, files, told), (10 << 20, 1, 2), "{lines}");
    assert!(lines.contains("files of 10 MiB") && lines.contains("this one 1"), "{lines}");
    assert!(!faults("services:\n  web:\n    image: x\n    logging: {options: {max-file: many}}\n").is_empty());
}

#[test]
fn what_kip_lacks_is_named_and_weighed() {
    let one = |line: &str| notes(&format!("services:\n  web:\n    image: x\n    {line}\n"));
    for (line, told) in [
        (
            "networks: [a, b]",
            "Harmless /srv/shop/compose.yaml:4:15: services.web.networks is not supported: all services",
        ),
        (
            "healthcheck: {test: curl x}",
            "Harmless /srv/shop/compose.yaml:4:5: services.web.healthcheck is not supported: the check runs",
        ),
        ("privileged: true", "Changes /srv/shop/compose.yaml:4:5: services.web.privileged is not supported: a proc is"),
        (
            "healthcheck: {disable: true, interval: 1s, start_interval: 1s}",
            "Harmless /srv/shop/compose.yaml:4:48: services.web.healthcheck.start_interval is not supported",
        ),
        (
            "networks: {a: {ipv4_address: 10.0.0.9}}",
            "Changes /srv/shop/compose.yaml:4:20: services.web.networks.a.ipv4_address is not supported: Kip assigns",
        ),
        (
            "depends_on: {db: {restart: true, required: false, condition: service_started}}",
            "Harmless /srv/shop/compose.yaml:4:23: services.web.depends_on.db.restart is not supported: a service runs on",
        ),
        (
            "deploy: {resources: {reservations: {devices: [{driver: nvidia}]}}}",
            "Changes /srv/shop/compose.yaml:4:41: services.web.deploy.resources.reservations.devices is not supported",
        ),
        (
            "deploy: {restart_policy: {condition: any, delay: 5s}}",
            "Harmless /srv/shop/compose.yaml:4:54: services.web.deploy.restart_policy.delay is not supported",
        ),
        (
            "environment: {A: $A_NAME}",
            "Harmless /srv/shop/compose.yaml:4:22: the variable A_NAME is not set: there is nothing in its place",
        ),
        (
            "volumes: [{type: bind, source: /a, target: /b, bind: {propagation: rshared}}]",
            "Changes /srv/shop/compose.yaml:4:59: services.web.volumes.bind.propagation is not supported",
        ),
        ("build: .", "Harmless /srv/shop/compose.yaml:4:5: services.web.build is not supported: the image is used"),
        ("tty: true", "Harmless /srv/shop/compose.yaml:4:5: services.web.tty: a proc with a terminal"),
        ("deploy: {replicas: 0}", "Changes /srv/shop/compose.yaml:4:24: services.web.deploy.replicas is not supported"),
        ("deploy: {mode: global}", "Changes /srv/shop/compose.yaml:4:14: services.web.deploy.mode is not supported"),
        (
            "extra_hosts: ['host.docker.internal:host-gateway']",
            "Changes /srv/shop/compose.yaml:4:19: services.web.extra_hosts: host-gateway is",
        ),
        ("network_mode: host", "Changes /srv/shop/compose.yaml:4:5: services.web.network_mode is not supported"),
        ("volumes: [/data]", "Harmless /srv/shop/compose.yaml:4:15: services.web.volumes is not supported: a volume"),
    ] {
        let all = one(line);
        assert!(all.len() == 1 && all[0].starts_with(told), "{line}: {all:?}");
    }
    for nothing in [
        "privileged: false",
        "restart: 'no'",
        "init: true",
        "ports: ['127.0.0.1:80:80']",
        "depends_on: {none: {condition: service_healthy, required: false}}",
        "hostname: ${HOST_NAME-shop-web}",
        "cap_add: []",
        "cap_add: [CAP_CHOWN, all]",
        "cap_drop: [ALL]",
        "read_only: true",
        "tmpfs: /run",
        "tmpfs: ['/run:size=64m,mode=755', /tmp]",
        "shm_size: 128mb",
        "volumes: [{type: tmpfs, target: /run, tmpfs: {size: 64m, mode: 0o755}}]",
        "labels: {team: shop}",
        "ulimits: {nproc: 65535, nofile: {soft: 20000, hard: 40000}}",
        "labels: [team=shop, alone]",
        "extra_hosts: ['db:192.0.2.7', 'six=::1']",
        "extra_hosts: {db: 192.0.2.7, two: [192.0.2.8, 192.0.2.9]}",
        "x-y: 1",
        "networks: [a]",
        "links: [web:w]",
        "stdin_open: true",
        "tty: false",
    ] {
        assert_eq!(one(nothing), Vec::<String>::new(), "{nothing}");
    }
    let two = notes("services:\n  a:\n    image: x\n  b_c:\n    image: x\n");
    assert!(two.len() == 1 && two[0].contains(":4:3: services.b_c is called shop-b-c"), "{two:?}");
    for (networks, told) in [
        ("{external: true, name: x}", "Changes /srv/shop/compose.yaml:2:5: networks.n.external is not supported"),
        ("{driver: macvlan}", "Changes /srv/shop/compose.yaml:2:5: networks.n.driver is not supported"),
        ("{ipam: {driver: x}}", "Harmless /srv/shop/compose.yaml:2:5: networks.n.ipam is not supported"),
    ] {
        let all = notes(&format!("networks: {{n:\n   {networks}}}\nservices: {{a: {{image: x}}}}\n"));
        assert!(all.len() == 1 && all[0].starts_with(told), "{networks}: {all:?}");
    }
    assert_eq!(notes("networks: {n: {internal: false, driver: bridge}, m: }\nservices: {a: {image: x}}\n"), [""; 0]);
}

#[test]
fn services_of_internal_networks_call_nothing_outside() {
    let egress = |networks: &str, service: &str| {
        let text = format!("networks: {networks}\nservices: {{a: {{image: x{service}}}}}\n");
        let all = &parse(&text).unwrap().procs[0].request.spec.egress;
        all.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
    };
    let two = "{in: {internal: true}, out: }";
    assert_eq!(egress(two, ", networks: [in]"), "none");
    assert_eq!(egress(two, ", networks: {in: {aliases: [b]}}"), "none");
    assert_eq!(egress(two, ", networks: [in, out]"), "");
    assert_eq!(egress(two, ""), "");
    assert_eq!(egress("{default: {internal: true}}", ""), "none");
    assert_eq!(
        egress("{in: {internal: true}}", ", networks: [in], x-kip: {egress: ['pypi.org:443', all.example]}"),
        "pypi.org:443 all.example"
    );
}

#[test]
fn a_project_is_called_as_compose_has_it() {
    let named = |top: &str, project: Option<&str>, variable: Option<&str>| {
        let text = format!("{top}\nservices: {{a: {{image: x, volumes: ['v:/v']}}}}\nvolumes: {{v: }}\n");
        let lookup = |key: &str| variable.filter(|_| key == "COMPOSE_PROJECT_NAME").map(str::to_owned);
        let path = Path::new("/srv/_My Shop.d/compose.yaml");
        let read = crate::read(&Reading { path, text: &text, overrides: &[], lookup: &lookup, project, profiles: &[] });
        read.map(|document| {
            let spec = &document.procs[0].request.spec;
            let volume = spec.volumes[0].to_string();
            assert_eq!(volume.strip_suffix("_v:/v"), spec.network.as_deref());
            (spec.name.to_string(), volume.trim_end_matches("_v:/v").to_owned(), document.project)
        })
        .map_err(|faults| faults.to_string())
    };
    let is = |proc: &str, network: &str, project: Option<&str>| {
        Ok((proc.to_owned(), network.to_owned(), project.map(str::to_owned)))
    };
    assert_eq!(named("", None, None), is("myshopd-a", "myshopd", None));
    assert_eq!(named("name: file_s", None, Some("")), is("file-s-a", "file_s", Some("file_s")));
    assert_eq!(named("name: file", None, Some("env")), is("env-a", "env", Some("env")));
    assert_eq!(named("name: file", Some("flag"), Some("env")), is("flag-a", "flag", Some("flag")));
    assert!(named("name: My Shop", None, None).unwrap_err().contains(":1:7: \"My Shop\" is no name of a project"));
}

// promise files: `x-kip` has the keys of a `kip.toml` in their forms, for a service or for all
#[test]
fn keys_of_kip_are_those_of_a_kip_toml() {
    let spec = |kips: &str| parse(kips).unwrap().procs[0].request.spec.clone();
    let both = "x-kip: {idle: 5s, tick: 2s}\nservices: {a: {image: x, x-kip: ";
    let one = spec(&format!("{both}{{probe: '9000=http:80/', idle: 7s, before-sleep: 'true'}}}}}}\n"));
    assert_eq!(one.probes.iter().map(ToString::to_string).collect::<Vec<_>>(), ["9000=http:80/"]);
    assert_eq!((one.timing.idle_ms, one.timing.tick_ms), (7000, 2000), "its own go before those of all");
    assert_eq!(one.hooks.before_sleep.as_deref(), Some("true"), "quoted it is no boolean");
    let two = spec(&format!("{both}{{probe: ['9000=http:80/', '9001=tcp:80'], never-sleep: true}}}}}}\n"));
    assert_eq!((two.probes.len(), two.timing.never), (2, true));
    let told = faults("x-kip: {idel: 5s}\nservices: {a: {image: x}, b: {image: x}}\n");
    assert_eq!(told, ["/srv/shop/compose.yaml:1:9: x-kip has no key idel: did you mean idle?"]);
}

// promise files: each key of `x-kip` is taken as people write it, numbers too
#[test]
fn each_key_of_kip_is_taken_as_people_write_it() {
    let written = [
        ("before-checkpoint", "sync"),
        ("scale-max", "8"),
        ("scale-min", "1"),
        ("scale-method", "warm"),
        ("scale-volumes", "share"),
        ("scale-probe", "'http:80/enough'"),
        ("scale-calm", "5m"),
        ("checkpoint-every", "10m"),
        ("checkpoint-keep", "6"),
        ("template", "auto"),
        ("template-after", "warm"),
        ("before-sleep", "sync"),
        ("after-clone", "rekey"),
        ("after-wake", "hello"),
        ("hook-timeout", "10"),
        ("probe", "'9000=http:80/'"),
        ("idle", "5"),
        ("park-after", "30"),
        ("archive-after", "1h"),
        ("tick", "0"),
        ("clock", "suspend"),
        ("hibernate", "held"),
        ("prefetch", "off"),
        ("lazy", "on"),
        ("file-pages", "keep"),
        ("fallback", "previous"),
        ("never-sleep", "true"),
        ("idle-dry-run", "true"),
        ("allow-setuid", "true"),
        ("tree", "write"),
        ("spawn", "8"),
        ("egress", "[none]"),
    ];
    for key in service::own::KIPS_OWN {
        let (_, value) = written.iter().find(|(name, _)| *name == key).unwrap_or_else(|| panic!("no value for {key}"));
        let needs = if key.starts_with("scale-") && key != "scale-max" { "scale-max: 4, " } else { "" };
        let text = format!("services: {{a: {{image: x, ports: [80], x-kip: {{{needs}{key}: {value}}}}}}}\n");
        if let Err(faults) = parse(&text) {
            panic!("{key}: {value}: {faults:?}");
        }
    }
}

// promise files: an unknown profile is refused, with the name of the one that was meant
#[test]
fn an_unknown_profile_is_told() {
    let text = "services:\n  a:\n    image: x\n  b:\n    image: x\n    profiles: [debug]\n";
    let notes = |profile: &str| {
        let profiles = [profile.to_owned()];
        let path = Path::new("/srv/shop/compose.yaml");
        let read =
            crate::read(&Reading { path, text, overrides: &[], lookup: &|_| None, project: None, profiles: &profiles })
                .unwrap();
        read.notes.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(notes("debug"), Vec::<String>::new());
    let told = "/srv/shop/compose.yaml:2:3: no service has the profile debgu: did you mean debug?";
    assert_eq!(notes("debgu"), [told]);
}

// promise files: `deploy.restart_policy` goes before `restart`
#[test]
fn how_often_it_is_started_again() {
    let policy = |service: &str| {
        let document = parse(&format!("services: {{a: {{image: x, {service}}}}}\n")).unwrap();
        document.procs[0].request.spec.restart.to_string()
    };
    assert_eq!(
        policy("deploy: {restart_policy: {condition: on-failure, max_attempts: 3}}, restart: always"),
        "on-failure:3"
    );
    assert_eq!(policy("restart: always, deploy: {restart_policy: {condition: none}}"), "no");
    assert_eq!(policy("deploy: {restart_policy: {}}, restart: 'no'"), "always");
}

// promise files: `deploy.replicas` and `scale` of a Compose file are so many replicas that are
//   there all the time, each of which begins with a start and shares the volumes; `x-kip` goes
//   before
// held by: this, `tests/test_scale.py::test_replicas_of_a_compose_file`
#[test]
fn so_many_replicas_are_there() {
    let scaled = |service: &str| {
        let document = parse(&format!("services: {{a: {{image: x, {service}}}}}\nvolumes: {{v: }}\n")).unwrap();
        let scale = document.procs[0].request.spec.scale.as_ref()?;
        Some((scale.min, scale.max, scale.method, scale.volumes))
    };
    let cold = CloneMethod::Cold;
    assert_eq!(scaled("deploy: {replicas: 3}"), Some((3, 3, cold, None)));
    assert_eq!(scaled("scale: 2, volumes: ['v:/v']"), Some((2, 2, cold, Some(ClonedVolumes::Share))));
    assert_eq!(scaled("deploy: {replicas: 1}"), None);
    let own = "x-kip: {scale-max: 8, scale-min: 0, scale-method: warm}";
    assert_eq!(scaled(&format!("deploy: {{replicas: 3}}, {own}")), Some((0, 8, CloneMethod::Warm, None)));
    assert_eq!(scaled("deploy: {replicas: 3}, x-kip: {scale-max: 2}"), Some((2, 2, cold, None)));
    let told = faults("services: {a: {image: x, scale: 33}}\n");
    assert_eq!(told, ["/srv/shop/compose.yaml:1:33: services.a.scale: at most 32"]);
}

#[test]
fn volumes_of_others_are_known() {
    let text = "services: {a: {image: x, volumes: ['v:/v', 'w:/w', 'u:/u']}}\nvolumes: {v: {external: true}, w: , u: {external: true, name: t}}\n";
    assert_eq!(parse(text).unwrap().procs[0].external, ["v", "t"]);
}

#[test]
fn mistakes_are_told_with_their_place() {
    let web = |line: &str| format!("services:\n  web:\n    image: x\n    {line}\n");
    for (text, told) in [
        (web("port: [80]"), "/srv/shop/compose.yaml:4:5: services.web has no key port: did you mean ports?"),
        (
            web("ports: [eighty]"),
            "/srv/shop/compose.yaml:4:13: services.web.ports: port \"eighty\" is not valid: write",
        ),
        (web("mem_limit: much"), "/srv/shop/compose.yaml:4:16: services.web.mem_limit: size \"MUCH\" is not valid"),
        (web("volumes: ['data:/data']"), "/srv/shop/compose.yaml:4:15: services.web.volumes: there is no volume data"),
        (web("depends_on: [db]"), "/srv/shop/compose.yaml:2:3: services.web.depends_on: there is no service db"),
        (web("user: ${WHO:?say who}"), "/srv/shop/compose.yaml:4:11: the variable WHO is needed: say who"),
        (
            web("x-kip: {idel: 5s}"),
            "/srv/shop/compose.yaml:4:13: services.web.x-kip has no key idel: did you mean idle?",
        ),
        (
            web("healthcheck: {test: x, start_periode: 5s}"),
            "/srv/shop/compose.yaml:4:28: services.web.healthcheck has no key start_periode: did you mean start_period?",
        ),
        (
            web("depends_on: {web: {conditon: service_healthy}}"),
            "/srv/shop/compose.yaml:4:24: services.web.depends_on.web has no key conditon: did you mean condition?",
        ),
        (
            web("networks: {a: {alias: [b]}}"),
            "/srv/shop/compose.yaml:4:20: services.web.networks.a has no key alias: did you mean aliases?",
        ),
        (
            "networks: {a: {intern: true}}\n".to_owned() + &web(""),
            "/srv/shop/compose.yaml:1:16: networks.a has no key intern: did you mean internal?",
        ),
        (
            web("ports: ['localhost:80:80']"),
            "/srv/shop/compose.yaml:4:13: services.web.ports: \"localhost\" is no address of a machine",
        ),
        (web("x-kip: {idle: soon}"), "/srv/shop/compose.yaml:4:19: services.web.x-kip.idle: duration \"soon\""),
        (web("env_file: none.env"), "/srv/shop/compose.yaml:4:15: services.web.env_file: the environment file"),
        ("services:\n  web:\n    command: x\n".to_owned(), "/srv/shop/compose.yaml:2:3: services.web names no image"),
        ("service: {}\n".to_owned(), "/srv/shop/compose.yaml:1:1: there is no key service: did you mean services?"),
        ("- a\n".to_owned(), "/srv/shop/compose.yaml:1:1: this is a list"),
        (
            "services: {a: {image: x, depends_on: [b]}, b: {image: x, depends_on: [a]}}".to_owned(),
            "/srv/shop/compose.yaml:1:12: these depend on each other in a circle: shop-a -> shop-b -> shop-a",
        ),
    ] {
        let all = faults(&text);
        assert!(all[0].starts_with(told), "{text}: {all:?}");
    }
}
