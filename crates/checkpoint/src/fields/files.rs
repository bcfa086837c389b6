//! Messages about open files, mounts, and what CRIU keeps of files.

/// `bpfmap_file_entry` of bpfmap-file.proto.
pub(crate) mod bpfmap_file_entry {
    pub(crate) const FOWN: u32 = 4;
}

/// `eventfd_file_entry` of eventfd.proto.
pub(crate) mod eventfd_file_entry {
    pub(crate) const FLAGS: u32 = 2;
    pub(crate) const FOWN: u32 = 3;
}

/// `eventpoll_tfd_entry` of eventpoll.proto.
pub(crate) mod eventpoll_tfd_entry {
    /// The descriptor that is watched.
    pub(crate) const TFD: u32 = 2;
    pub(crate) const EVENTS: u32 = 3;
    pub(crate) const DATA: u32 = 4;
}

/// `eventpoll_file_entry` of eventpoll.proto.
pub(crate) mod eventpoll_file_entry {
    pub(crate) const FOWN: u32 = 3;
    /// What is watched: [`super::eventpoll_tfd_entry`].
    pub(crate) const TFD: u32 = 4;
}

/// `ext_file_entry` of ext-file.proto.
pub(crate) mod ext_file_entry {
    pub(crate) const FOWN: u32 = 5;
}

/// `fdinfo_entry` of fdinfo.proto.
pub(crate) mod fdinfo_entry {
    /// The file's id.
    pub(crate) const ID: u32 = 1;
    /// 1 is FD_CLOEXEC.
    pub(crate) const FLAGS: u32 = 2;
    /// See [`crate::codes::kind`].
    pub(crate) const TYPE: u32 = 3;
    /// The descriptor.
    pub(crate) const FD: u32 = 4;
}

/// `file_entry` of fdinfo.proto.
pub(crate) mod file_entry {
    /// See [`crate::codes::kind`]. The fields from `REG` on are for one kind each.
    pub(crate) const TYPE: u32 = 1;
    pub(crate) const ID: u32 = 2;
    pub(crate) const REG: u32 = 3;
    pub(crate) const ISK: u32 = 4;
    pub(crate) const PSK: u32 = 6;
    pub(crate) const NLSK: u32 = 7;
    pub(crate) const EFD: u32 = 8;
    pub(crate) const EPFD: u32 = 9;
    pub(crate) const SGFD: u32 = 10;
    pub(crate) const TFD: u32 = 12;
    pub(crate) const IFY: u32 = 13;
    pub(crate) const FFY: u32 = 14;
    pub(crate) const EXT: u32 = 15;
    pub(crate) const USK: u32 = 16;
    pub(crate) const FIFO: u32 = 17;
    pub(crate) const PIPE: u32 = 18;
    pub(crate) const TTY: u32 = 19;
    pub(crate) const MEMFD: u32 = 20;
    pub(crate) const BPF: u32 = 21;
    pub(crate) const PIDFD: u32 = 22;
}

/// `fifo_entry` of fifo.proto.
pub(crate) mod fifo_entry {
    /// The id of the FIFO's path and flags among regular files.
    pub(crate) const REGF_ID: u32 = 3;
}

/// `file_lock_entry` of file-lock.proto.
pub(crate) mod file_lock_entry {
    /// 1 is of fcntl(2), 2 of flock(2), 4 an open file description lock.
    pub(crate) const FLAG: u32 = 1;
    /// 0 is for reading, 1 for writing.
    pub(crate) const TYPE: u32 = 2;
    pub(crate) const PID: u32 = 3;
    pub(crate) const FD: u32 = 4;
    pub(crate) const START: u32 = 5;
    pub(crate) const LEN: u32 = 6;
}

/// `fown_entry` of fown.proto.
pub(crate) mod fown_entry {
    pub(crate) const UID: u32 = 1;
    pub(crate) const EUID: u32 = 2;
    pub(crate) const SIGNUM: u32 = 3;
    /// 0 is a thread, 1 a process, 2 a process group.
    pub(crate) const PID_TYPE: u32 = 4;
    /// The receiver of the signal; 0 if there is none.
    pub(crate) const PID: u32 = 5;
}

/// `inotify_wd_entry` of fsnotify.proto.
pub(crate) mod inotify_wd_entry {
    /// IN_* of inotify(7).
    pub(crate) const MASK: u32 = 3;
    /// The file system, as the kernel numbers devices; a mount's `ROOT_DEV` is alike.
    pub(crate) const S_DEV: u32 = 5;
}

/// `inotify_file_entry` of fsnotify.proto.
pub(crate) mod inotify_file_entry {
    pub(crate) const FLAGS: u32 = 2;
    pub(crate) const FOWN: u32 = 4;
    pub(crate) const WD: u32 = 5;
}

/// `fanotify_file_entry` of fsnotify.proto.
pub(crate) mod fanotify_file_entry {
    pub(crate) const FOWN: u32 = 3;
}

/// `ghost_file_entry` of ghost-file.proto.
pub(crate) mod ghost_file_entry {
    pub(crate) const UID: u32 = 1;
    pub(crate) const GID: u32 = 2;
    pub(crate) const MODE: u32 = 3;
}

/// `memfd_file_entry` of memfd.proto.
pub(crate) mod memfd_file_entry {
    pub(crate) const FLAGS: u32 = 2;
    pub(crate) const POS: u32 = 3;
    pub(crate) const FOWN: u32 = 4;
    /// The number of the memory file: `INODE_ID` of [`super::memfd_inode_entry`].
    pub(crate) const INODE_ID: u32 = 5;
}

/// `memfd_inode_entry` of memfd.proto.
pub(crate) mod memfd_inode_entry {
    pub(crate) const NAME: u32 = 1;
    pub(crate) const UID: u32 = 2;
    pub(crate) const GID: u32 = 3;
    pub(crate) const SIZE: u32 = 4;
    /// The number of its contents.
    pub(crate) const SHMID: u32 = 5;
    /// F_SEAL_* of fcntl(2).
    pub(crate) const SEALS: u32 = 6;
    pub(crate) const INODE_ID: u32 = 7;
    pub(crate) const HUGETLB_FLAG: u32 = 8;
    pub(crate) const MODE: u32 = 9;
}

/// `mnt_entry` of mnt.proto.
pub mod mnt_entry {
    pub(crate) const FSTYPE: u32 = 1;
    pub(crate) const MNT_ID: u32 = 2;
    pub(crate) const ROOT_DEV: u32 = 3;
    pub(crate) const FLAGS: u32 = 5;
    /// What of the file system is mounted.
    pub(crate) const ROOT: u32 = 6;
    /// The path inside.
    pub const MOUNTPOINT: u32 = 7;
    pub(crate) const SHARED_ID: u32 = 10;
    pub(crate) const MASTER_ID: u32 = 11;
    pub(crate) const WITH_PLUGIN: u32 = 12;
    pub(crate) const EXT_MOUNT: u32 = 13;
    pub(crate) const INTERNAL_SHARING: u32 = 15;
    pub(crate) const DELETED: u32 = 16;
    /// The key of a mount that is given from outside.
    pub(crate) const EXT_KEY: u32 = 18;
}

/// `packet_sock_entry` of packet-sock.proto.
pub(crate) mod packet_sock_entry {
    pub(crate) const FLAGS: u32 = 4;
    pub(crate) const FOWN: u32 = 6;
}

/// `pidfd_entry` of pidfd.proto.
pub(crate) mod pidfd_entry {
    pub(crate) const FLAGS: u32 = 3;
    /// The process, as numbered inside; -1 if it has ended and gone.
    pub(crate) const NSPID: u32 = 4;
    pub(crate) const FOWN: u32 = 5;
}

/// `pipe_entry` of pipe.proto.
pub(crate) mod pipe_entry {
    pub(crate) const PIPE_ID: u32 = 2;
    pub(crate) const FLAGS: u32 = 3;
    pub(crate) const FOWN: u32 = 4;
}

/// `reg_file_entry` of regfile.proto.
pub(crate) mod reg_file_entry {
    pub(crate) const ID: u32 = 1;
    pub(crate) const FLAGS: u32 = 2;
    pub(crate) const POS: u32 = 3;
    pub(crate) const FOWN: u32 = 5;
    pub(crate) const NAME: u32 = 6;
    /// A sint32, which is stored folded: 0, -1, 1, -2 ..
    pub(crate) const MNT_ID: u32 = 7;
    /// Bytes; a file of another size is not restored.
    pub(crate) const SIZE: u32 = 8;
    /// The file is given from outside.
    pub(crate) const EXT: u32 = 9;
    /// `st_mode` of stat(2).
    pub(crate) const MODE: u32 = 10;
}

/// `remap_file_path_entry` of remap-file-path.proto.
pub(crate) mod remap_file_path_entry {
    pub(crate) const ORIG_ID: u32 = 1;
    /// See [`crate::codes::remap`].
    pub(crate) const REMAP_TYPE: u32 = 3;
}

/// `signalfd_entry` of signalfd.proto.
pub(crate) mod signalfd_entry {
    pub(crate) const FLAGS: u32 = 2;
    pub(crate) const FOWN: u32 = 3;
}

/// `inet_sk_entry` of sk-inet.proto.
pub(crate) mod inet_sk_entry {
    /// The inode in sockfs.
    pub(crate) const INO: u32 = 2;
    pub(crate) const FLAGS: u32 = 9;
    pub(crate) const FOWN: u32 = 13;
}

/// `netlink_sk_entry` of sk-netlink.proto.
pub(crate) mod netlink_sk_entry {
    pub(crate) const INO: u32 = 2;
    pub(crate) const PROTOCOL: u32 = 3;
    pub(crate) const FLAGS: u32 = 6;
    pub(crate) const FOWN: u32 = 11;
}

/// `sk_packet_entry` of sk-packet.proto.
pub(crate) mod sk_packet_entry {
    /// The id of the socket's file.
    pub(crate) const ID_FOR: u32 = 1;
    /// Bytes, which follow the message.
    pub(crate) const LENGTH: u32 = 2;
}

/// `unix_sk_entry` of sk-unix.proto.
pub(crate) mod unix_sk_entry {
    /// The inode in sockfs.
    pub(crate) const INO: u32 = 2;
    /// SOCK_* of socket(2).
    pub(crate) const TYPE: u32 = 3;
    /// As of TCP: 1 connected, 7 not, 10 listening.
    pub(crate) const STATE: u32 = 4;
    pub(crate) const FLAGS: u32 = 5;
    /// Not 0 if it is connected to a socket outside, or inherited.
    pub(crate) const UFLAGS: u32 = 6;
    /// The inode of the other side, or 0.
    pub(crate) const PEER: u32 = 8;
    pub(crate) const FOWN: u32 = 9;
    /// The path, or 0 and an abstract name.
    pub(crate) const NAME: u32 = 11;
    /// A sint32, which is stored folded: 0, -1, 1, -2 ..
    pub(crate) const MNT_ID: u32 = 17;
}

/// `timerfd_entry` of timerfd.proto.
pub(crate) mod timerfd_entry {
    pub(crate) const ID: u32 = 1;
    pub(crate) const FLAGS: u32 = 2;
    pub(crate) const FOWN: u32 = 3;
    pub(crate) const CLOCKID: u32 = 4;
}

/// `tty_file_entry` of tty.proto.
pub(crate) mod tty_file_entry {
    /// The id of the terminal's own entry.
    pub(crate) const TTY_INFO_ID: u32 = 2;
    pub(crate) const FLAGS: u32 = 3;
    pub(crate) const FOWN: u32 = 4;
}

/// `tty_info_entry` of tty.proto.
pub(crate) mod tty_info_entry {
    pub(crate) const ID: u32 = 1;
    /// The number of the device.
    pub(crate) const RDEV: u32 = 8;
}
