//! Messages about open files, mounts, and what CRIU keeps of files.

/// `bpfmap_file_entry` of bpfmap-file.proto.
pub mod bpfmap_file_entry {
    pub const FOWN: u32 = 4;
}

/// `eventfd_file_entry` of eventfd.proto.
pub mod eventfd_file_entry {
    pub const FLAGS: u32 = 2;
    pub const FOWN: u32 = 3;
    pub const COUNTER: u32 = 4;
}

/// `eventpoll_tfd_entry` of eventpoll.proto.
pub mod eventpoll_tfd_entry {
    /// The descriptor that is watched.
    pub const TFD: u32 = 2;
    pub const EVENTS: u32 = 3;
    pub const DATA: u32 = 4;
}

/// `eventpoll_file_entry` of eventpoll.proto.
pub mod eventpoll_file_entry {
    pub const FOWN: u32 = 3;
    /// What is watched: [`super::eventpoll_tfd_entry`].
    pub const TFD: u32 = 4;
}

/// `ext_file_entry` of ext-file.proto.
pub mod ext_file_entry {
    pub const FOWN: u32 = 5;
}

/// `fdinfo_entry` of fdinfo.proto.
pub mod fdinfo_entry {
    /// The file's id.
    pub const ID: u32 = 1;
    /// 1 is FD_CLOEXEC.
    pub const FLAGS: u32 = 2;
    /// See [`crate::codes::kind`].
    pub const TYPE: u32 = 3;
    /// The descriptor.
    pub const FD: u32 = 4;
}

/// `file_entry` of fdinfo.proto.
pub mod file_entry {
    /// See [`crate::codes::kind`]. The fields from `REG` on are for one kind each.
    pub const TYPE: u32 = 1;
    pub const ID: u32 = 2;
    pub const REG: u32 = 3;
    pub const ISK: u32 = 4;
    pub const PSK: u32 = 6;
    pub const NLSK: u32 = 7;
    pub const EFD: u32 = 8;
    pub const EPFD: u32 = 9;
    pub const SGFD: u32 = 10;
    pub const TFD: u32 = 12;
    pub const IFY: u32 = 13;
    pub const FFY: u32 = 14;
    pub const EXT: u32 = 15;
    pub const USK: u32 = 16;
    pub const FIFO: u32 = 17;
    pub const PIPE: u32 = 18;
    pub const TTY: u32 = 19;
    pub const MEMFD: u32 = 20;
    pub const BPF: u32 = 21;
    pub const PIDFD: u32 = 22;
}

/// `fifo_entry` of fifo.proto.
pub mod fifo_entry {
    /// The id of the FIFO's path and flags among regular files.
    pub const REGF_ID: u32 = 3;
}

/// `file_lock_entry` of file-lock.proto.
pub mod file_lock_entry {
    /// 1 is of fcntl(2), 2 of flock(2), 4 an open file description lock.
    pub const FLAG: u32 = 1;
    /// 0 is for reading, 1 for writing.
    pub const TYPE: u32 = 2;
    pub const PID: u32 = 3;
    pub const FD: u32 = 4;
    pub const START: u32 = 5;
    pub const LEN: u32 = 6;
}

/// `fown_entry` of fown.proto.
pub mod fown_entry {
    pub const UID: u32 = 1;
    pub const EUID: u32 = 2;
    pub const SIGNUM: u32 = 3;
    /// 0 is a thread, 1 a process, 2 a process group.
    pub const PID_TYPE: u32 = 4;
    /// The receiver of the signal; 0 if there is none.
    pub const PID: u32 = 5;
}

/// `inotify_wd_entry` of fsnotify.proto.
pub mod inotify_wd_entry {
    /// IN_* of inotify(7).
    pub const MASK: u32 = 3;
    /// The file system, as the kernel numbers devices; a mount's `ROOT_DEV` is alike.
    pub const S_DEV: u32 = 5;
}

/// `inotify_file_entry` of fsnotify.proto.
pub mod inotify_file_entry {
    pub const FLAGS: u32 = 2;
    pub const FOWN: u32 = 4;
    pub const WD: u32 = 5;
}

/// `fanotify_file_entry` of fsnotify.proto.
pub mod fanotify_file_entry {
    pub const FOWN: u32 = 3;
}

/// `ghost_file_entry` of ghost-file.proto.
pub mod ghost_file_entry {
    pub const UID: u32 = 1;
    pub const GID: u32 = 2;
    pub const MODE: u32 = 3;
    /// The contents are in chunks.
    pub const CHUNKS: u32 = 9;
    /// Bytes, where they are.
    pub const SIZE: u32 = 10;
}

/// `ghost_chunk_entry` of ghost-file.proto.
pub mod ghost_chunk_entry {
    pub const LENGTH: u32 = 1;
    pub const OFFSET: u32 = 2;
}

/// `memfd_file_entry` of memfd.proto.
pub mod memfd_file_entry {
    pub const FLAGS: u32 = 2;
    pub const POS: u32 = 3;
    pub const FOWN: u32 = 4;
    /// The number of the memory file: `INODE_ID` of [`super::memfd_inode_entry`].
    pub const INODE_ID: u32 = 5;
}

/// `memfd_inode_entry` of memfd.proto.
pub mod memfd_inode_entry {
    pub const NAME: u32 = 1;
    pub const UID: u32 = 2;
    pub const GID: u32 = 3;
    pub const SIZE: u32 = 4;
    /// The number of its contents.
    pub const SHMID: u32 = 5;
    /// F_SEAL_* of fcntl(2).
    pub const SEALS: u32 = 6;
    pub const INODE_ID: u32 = 7;
    pub const HUGETLB_FLAG: u32 = 8;
    pub const MODE: u32 = 9;
}

/// `mnt_entry` of mnt.proto.
pub mod mnt_entry {
    pub const FSTYPE: u32 = 1;
    pub const MNT_ID: u32 = 2;
    pub const ROOT_DEV: u32 = 3;
    pub const FLAGS: u32 = 5;
    /// What of the file system is mounted.
    pub const ROOT: u32 = 6;
    /// The path inside.
    pub const MOUNTPOINT: u32 = 7;
    pub const SHARED_ID: u32 = 10;
    pub const MASTER_ID: u32 = 11;
    pub const WITH_PLUGIN: u32 = 12;
    pub const EXT_MOUNT: u32 = 13;
    pub const INTERNAL_SHARING: u32 = 15;
    pub const DELETED: u32 = 16;
    /// The key of a mount that is given from outside.
    pub const EXT_KEY: u32 = 18;
}

/// `packet_sock_entry` of packet-sock.proto.
pub mod packet_sock_entry {
    pub const FLAGS: u32 = 4;
    pub const FOWN: u32 = 6;
}

/// `pidfd_entry` of pidfd.proto.
pub mod pidfd_entry {
    pub const FLAGS: u32 = 3;
    /// The process, as numbered inside; -1 if it has ended and gone.
    pub const NSPID: u32 = 4;
    pub const FOWN: u32 = 5;
}

/// `pipe_data_entry` of pipe-data.proto.
pub mod pipe_data_entry {
    pub const PIPE_ID: u32 = 1;
    /// Bytes, which follow the message.
    pub const BYTES: u32 = 2;
    /// What the pipe takes at most, bytes.
    pub const SIZE: u32 = 3;
}

/// `pipe_entry` of pipe.proto.
pub mod pipe_entry {
    pub const PIPE_ID: u32 = 2;
    pub const FLAGS: u32 = 3;
    pub const FOWN: u32 = 4;
}

/// `reg_file_entry` of regfile.proto.
pub mod reg_file_entry {
    pub const ID: u32 = 1;
    pub const FLAGS: u32 = 2;
    pub const POS: u32 = 3;
    pub const FOWN: u32 = 5;
    pub const NAME: u32 = 6;
    /// A sint32, which is stored folded: 0, -1, 1, -2 ..
    pub const MNT_ID: u32 = 7;
    /// Bytes; a file of another size is not restored.
    pub const SIZE: u32 = 8;
    /// The file is given from outside.
    pub const EXT: u32 = 9;
    /// `st_mode` of stat(2).
    pub const MODE: u32 = 10;
}

/// `remap_file_path_entry` of remap-file-path.proto.
pub mod remap_file_path_entry {
    pub const ORIG_ID: u32 = 1;
    /// The number of the image of a deleted file.
    pub const REMAP_ID: u32 = 2;
    /// See [`crate::codes::remap`].
    pub const REMAP_TYPE: u32 = 3;
}

/// `signalfd_entry` of signalfd.proto.
pub mod signalfd_entry {
    pub const FLAGS: u32 = 2;
    pub const FOWN: u32 = 3;
    /// Signal N is bit N - 1.
    pub const SIGMASK: u32 = 4;
}

/// `inet_sk_entry` of sk-inet.proto.
pub mod inet_sk_entry {
    /// The inode in sockfs.
    pub const INO: u32 = 2;
    pub const FLAGS: u32 = 9;
    pub const FOWN: u32 = 13;
}

/// `netlink_sk_entry` of sk-netlink.proto.
pub mod netlink_sk_entry {
    pub const INO: u32 = 2;
    pub const PROTOCOL: u32 = 3;
    pub const FLAGS: u32 = 6;
    pub const FOWN: u32 = 11;
}

/// `sk_packet_entry` of sk-packet.proto.
pub mod sk_packet_entry {
    /// The id of the socket's file.
    pub const ID_FOR: u32 = 1;
    /// Bytes, which follow the message.
    pub const LENGTH: u32 = 2;
    /// The sender's address, of a datagram.
    pub const ADDR: u32 = 3;
    /// Descriptors that come with them, `scm_entry`.
    pub const SCM: u32 = 4;
}

/// `sk_opts_entry` of sk-opts.proto.
pub mod sk_opts_entry {
    /// Bytes of the buffers, as getsockopt(2) has them: twice what was asked for.
    pub const SNDBUF: u32 = 1;
    pub const RCVBUF: u32 = 2;
    /// Time-outs, of which all are 0 as a rule.
    pub const SND_TMO_SEC: u32 = 3;
    pub const SND_TMO_USEC: u32 = 4;
    pub const RCV_TMO_SEC: u32 = 5;
    pub const RCV_TMO_USEC: u32 = 6;
    pub const PRIORITY: u32 = 8;
    pub const MARK: u32 = 10;
    /// 1 if a message comes with the ids of its sender.
    pub const PASSCRED: u32 = 11;
    pub const PASSSEC: u32 = 12;
    pub const BOUND_DEV: u32 = 15;
    /// A filter of BPF.
    pub const FILTER: u32 = 16;
}

/// `file_perms_entry` of sk-unix.proto.
pub mod file_perms_entry {
    pub const MODE: u32 = 1;
    /// As numbered inside.
    pub const UID: u32 = 2;
    pub const GID: u32 = 3;
}

/// `unix_sk_entry` of sk-unix.proto.
pub mod unix_sk_entry {
    /// The inode in sockfs.
    pub const INO: u32 = 2;
    /// SOCK_* of socket(2).
    pub const TYPE: u32 = 3;
    /// As of TCP: 1 connected, 7 not, 10 listening.
    pub const STATE: u32 = 4;
    pub const FLAGS: u32 = 5;
    /// Not 0 if it is connected to a socket outside, or inherited.
    pub const UFLAGS: u32 = 6;
    /// Of a listening one, the second argument of listen(2).
    pub const BACKLOG: u32 = 7;
    /// The inode of the other side, or 0.
    pub const PEER: u32 = 8;
    pub const FOWN: u32 = 9;
    /// Options: [`super::sk_opts_entry`].
    pub const OPTS: u32 = 10;
    /// The path, or 0 and an abstract name.
    pub const NAME: u32 = 11;
    /// What shutdown(2) has closed: 1 reading, 2 writing, 3 both.
    pub const SHUTDOWN: u32 = 12;
    /// Mode and owner of the file at its path: [`super::file_perms_entry`].
    pub const FILE_PERMS: u32 = 13;
    /// 1 if there is no file at its path any more.
    pub const DELETED: u32 = 15;
    /// A sint32, which is stored folded: 0, -1, 1, -2 ..
    pub const MNT_ID: u32 = 17;
}

/// `timerfd_entry` of timerfd.proto.
pub mod timerfd_entry {
    pub const ID: u32 = 1;
    pub const FLAGS: u32 = 2;
    pub const FOWN: u32 = 3;
    pub const CLOCKID: u32 = 4;
}

/// `tty_file_entry` of tty.proto.
pub mod tty_file_entry {
    /// The id of the terminal's own entry.
    pub const TTY_INFO_ID: u32 = 2;
    pub const FLAGS: u32 = 3;
    pub const FOWN: u32 = 4;
}

/// `tty_info_entry` of tty.proto.
pub mod tty_info_entry {
    pub const ID: u32 = 1;
    /// The number of the device.
    pub const RDEV: u32 = 8;
}
