//! The sockets and watches of files of a sleeper, at the wake plane.

use crate::fd_store::key;
use crate::host::Proc;
use kip_net::custody::{self, HeldSocket, SocketKind};
use kip_records::body::Body;
use kip_types::{PortSpec, Protocol, WakeOn, chain};

/// Polls the held sockets of a parked proc and its watches of files from now on.
pub fn watch(proc: &Proc, body: &Body) {
    watch_sockets(proc, body);
    for inotify in &body.inotify {
        let Some(fd) = crate::inotify::held(inotify, proc) else { continue };
        let held = HeldSocket { fd, saved: custody::inotify(inotify.queued) };
        if let Err(e) = proc.shared.wake_plane.add(proc.slot, held, WakeOn::Connect) {
            tracing::warn!(proc = %proc.name, error = chain(&e), "held watches of files cannot be polled");
        }
    }
}

/// Polls its held sockets only: a wake that failed has touched its files. What was polled before is
/// polled no longer, for a wake that failed, or a fall-back to an older generation, may have begun
/// that already.
pub fn watch_sockets(proc: &Proc, body: &Body) {
    unwatch_sockets(proc);
    for socket in &body.sockets {
        let Some(fd) = proc.fd_store.get(&format!("{}{}", key::SOCKET, socket.inode)) else { continue };
        let wake_on = wake_on(&proc.spec().ports, &socket.options.kind);
        let held = HeldSocket { fd, saved: socket.options };
        if let Err(e) = proc.shared.wake_plane.add(proc.slot, held, wake_on) {
            tracing::warn!(proc = %proc.name, inode = socket.inode, error = chain(&e), "a held socket cannot be watched");
        }
    }
}

/// Polls the sockets of a hibernated proc whose threads are held, from now on.
pub fn watch_held(proc: &Proc, sockets: &[HeldSocket]) {
    for held in sockets {
        let wake_on = wake_on(&proc.spec().ports, &held.saved.kind);
        if let Err(e) = proc.shared.wake_plane.add(proc.slot, held.clone(), wake_on) {
            tracing::warn!(proc = %proc.name, error = chain(&e), "a socket of a held program cannot be watched");
        }
    }
}

/// Whether a socket wakes its proc as soon as it is readable.
pub fn wakes_at_once(proc: &Proc, kind: &SocketKind) -> bool {
    wake_on(&proc.spec().ports, kind) == WakeOn::Connect
}

/// Polls them no longer.
pub fn unwatch_sockets(proc: &Proc) {
    proc.shared.wake_plane.remove(&proc.slot);
}

/// What on this socket wakes: only TCP listeners of declared ports have a choice.
fn wake_on(ports: &[PortSpec], kind: &SocketKind) -> WakeOn {
    let SocketKind::Listener { local, .. } = kind else { return WakeOn::Connect };
    let declared = ports.iter().find(|p| p.proto == Protocol::Tcp && p.port == local.port());
    declared.map_or(WakeOn::Connect, |p| p.wake_on)
}
