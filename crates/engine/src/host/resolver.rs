//! Names of procs in DNS: a resolver at 127.0.0.11:53 inside each proc of a network and each whose
//! egress is limited, which /etc/resolv.conf there names first.
//!
//! It answers for the names and aliases of the procs of that network, as they are at that moment,
//! and hands all other questions to the machine's own name servers. Of a proc with
//! limited egress only questions for names that its rules have go there, for a question can carry
//! anything out; all others have the answer that there is no such name. The addresses that are
//! found for a name are allowed before the proc has them ([`super::egress`]). Its sockets are made
//! in the proc's network namespace and held by the keeper, so that a question that comes while no
//! daemon runs is answered by the next. A proc with a port 53 of its own has none: the address is
//! the program's then. A question wakes no proc, and keeps none awake.

use super::egress::{self, EgressControl};
use super::{Host, Proc};
use crate::fd_store::key;
use kip_dns::PORT;
use kip_net::Slot;
use kip_net::addr::Addresses;
use kip_sys::netns;
use parking_lot::Mutex;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener as StdListener, UdpSocket as StdUdp};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::net::{TcpListener, UdpSocket};
use tokio::task::AbortHandle;

/// Where programs find it: the address that Docker's has.
pub const ADDRESS: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 11);

/// The resolver of a proc; dropped, it ends.
#[derive(Debug, Default)]
pub struct Resolver(Mutex<Option<AbortHandle>>);

impl Resolver {
    /// Ends it. Its sockets live as long as they are held.
    pub fn end(&self) {
        if let Some(task) = self.0.lock().take() {
            task.abort();
        }
    }

    fn replace(&self, task: AbortHandle) {
        if let Some(before) = self.0.lock().replace(task) {
            before.abort();
        }
    }
}

impl Drop for Resolver {
    fn drop(&mut self) {
        self.end();
    }
}

/// Whether a proc has a resolver. One that is alone, a trial, asks no server outside.
pub fn has_one(proc: &Proc) -> bool {
    !proc.spec().alone && (proc.spec().network.is_some() || proc.egress.is_limited()) && !proc.spec().has_dns_port()
}

/// Makes the resolver of a proc whose network namespace is new. What fails is logged: names are in
/// its /etc/hosts too.
pub fn make(proc: &Proc, namespace: BorrowedFd<'_>) {
    if !has_one(proc) {
        return;
    }
    let held = sockets(namespace).and_then(|(udp, tcp)| {
        let fds = vec![(key::DNS_UDP.to_owned(), udp), (key::DNS_TCP.to_owned(), tcp)];
        proc.fd_store.hold(fds).map_err(io::Error::other)
    });
    match held {
        Ok(()) => take_up(proc),
        Err(error) => tracing::warn!(proc = %proc.name, %error, "names are not in its DNS"),
    }
}

/// Answers by the sockets that are held, if there are any. Until all procs are known, questions
/// wait in them.
pub fn take_up(proc: &Proc) {
    if !proc.shared.knows_names.load(Ordering::SeqCst) {
        return;
    }
    let (Some(udp), Some(tcp)) = (proc.fd_store.get(key::DNS_UDP), proc.fd_store.get(key::DNS_TCP)) else { return };
    let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
    let names = Names {
        machine: Arc::clone(&proc.shared),
        network: proc.spec().network.clone(),
        slot: proc.slot,
        egress: Arc::clone(&proc.egress),
    };
    let started = (|| {
        let _within = runtime.enter();
        let udp = UdpSocket::from_std(StdUdp::from(udp.try_clone()?))?;
        let tcp = TcpListener::from_std(StdListener::from(tcp.try_clone()?))?;
        io::Result::Ok(runtime.spawn(kip_dns::serve(Arc::new(names), udp, tcp)).abort_handle())
    })();
    match started {
        Ok(task) => proc.resolver.replace(task),
        Err(error) => tracing::warn!(proc = %proc.name, %error, "names are not in its DNS"),
    }
}

/// Its sockets, in that network namespace.
fn sockets(namespace: BorrowedFd<'_>) -> io::Result<(OwnedFd, OwnedFd)> {
    let make = || {
        netns::enter_net(namespace)?;
        let (udp, tcp) = (StdUdp::bind((ADDRESS, PORT))?, StdListener::bind((ADDRESS, PORT))?);
        udp.set_nonblocking(true)?;
        tcp.set_nonblocking(true)?;
        Ok((udp.into(), tcp.into()))
    };
    // A thread of its own, for it does not come back.
    std::thread::scope(|scope| scope.spawn(make).join().expect("making sockets does not panic"))
}

/// What a proc may know names of.
struct Names {
    machine: Arc<Host>,
    /// Its procs are known by their names; none: no procs are.
    network: Option<String>,
    slot: Slot,
    egress: Arc<EgressControl>,
}

impl kip_dns::Names for Names {
    /// Of the proc that has this name there.
    fn addresses(&self, name: &str) -> Option<(Ipv4Addr, Ipv6Addr)> {
        let name = name.trim_end_matches('.');
        let is_it = |proc: &Proc| {
            let spec = proc.spec();
            let mut names = std::iter::once(proc.name.as_str()).chain(spec.aliases.iter().map(String::as_str));
            spec.network == self.network && names.any(|known| known.eq_ignore_ascii_case(name))
        };
        self.network.as_ref()?;
        let slot = self.machine.live_procs().iter().find(|proc| is_it(proc))?.slot;
        let Addresses { v4, v6, .. } = Addresses::of(self.machine.instance, slot);
        Some((v4, v6))
    }

    fn may_ask(&self, name: &str) -> bool {
        let may = self.egress.may_ask(name);
        if !may {
            self.egress.note(format!("name {}", name.trim_end_matches('.')));
        }
        may
    }

    fn servers(&self) -> Vec<SocketAddr> {
        let text = kip_sandbox::base::resolv_conf("/".as_ref()).and_then(|path| std::fs::read_to_string(path).ok());
        kip_dns::servers_in(&text.unwrap_or_default())
    }

    async fn found(&self, name: &str, addresses: Vec<IpAddr>) {
        if self.egress.is_limited() {
            egress::learn(&self.machine, self.slot, &self.egress, name, addresses).await;
        }
    }
}
