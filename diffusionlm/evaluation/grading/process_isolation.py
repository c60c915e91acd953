"""Cut a process off from the rest of the machine: namespaces, a root directory of its own, a filter of system calls.

Standard library only, for Linux; on other systems nothing is isolated. Each function returns whether it succeeded.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
from typing import Any

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH = 2
SYS_MOUNT_SETATTR = 442
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/gnu/store")
"""What an interpreter may need beside its own prefix."""

DENIED_CALLS = {
    # Processes and signals.
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "kill": (62, 129),
    "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "prlimit64": (302, 261), "setpriority": (141, 140),
    # Network and communication.
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200), "io_uring_setup": (425, 425),
    # Memory beside the address space.
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "memfd_create": (319, 279),
    # Parts of the kernel that programs seldom need.
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
}  # fmt: skip
"""System calls that fail with EPERM for a filtered process: name -> numbers on x86-64 and on 64-bit ARM."""
MACHINES = {"x86_64": (0, 0xC000003E, 56), "aarch64": (1, 0xC00000B7, 220)}
"""Machine -> column in `DENIED_CALLS`, number of the architecture in <linux/audit.h>, number of ``clone``."""
CLONE_THREAD, CLONE3, FIRST_X32_CALL = 0x10000, 435, 0x40000000
EPERM, ENOSYS = 1, 38


def enter_namespaces() -> tuple[bool, bool]:
    """Enter new namespaces of network, processes, files and, unless root may do without, users.

    Returns:
        Whether the others were entered, and whether that of users was.
    """
    flags = CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNS
    if os.geteuid() == 0 and _call("unshare", flags):
        return True, False
    user, group = os.geteuid(), os.getegid()
    if not _call("unshare", CLONE_NEWUSER | flags):
        return False, False
    for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return True, True


def continue_as_first_process() -> None:
    """Fork into the new namespace of processes, in which the end of the first process kills all others.

    Returns in the child. The parent waits for it, kills it on SIGTERM, and exits like it.
    """
    process = os.fork()
    if not process:
        control_process(PR_SET_PDEATHSIG, signal.SIGKILL)
        return

    def kill_child(*_: object) -> None:
        os.kill(process, signal.SIGKILL)

    signal.signal(signal.SIGTERM, kill_child)
    _, status = os.waitpid(process, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def enter_root(folder: str, prefix: str, size: int) -> bool:
    """Change to a root directory with the system's programs and ``prefix``, read-only, and an empty ``/work``.

    Args:
        folder: where the root directory is put together; nothing of it outlives the namespace.
        prefix: folder of the interpreter.
        size: bytes of all files in ``/work``.
    """
    if not _call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None):
        return False
    if not _call("mount", b"tmpfs", folder.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, b"size=1m,mode=755"):
        return False
    try:
        paths = [*SYSTEM_FOLDERS, "/dev/null", "/dev/urandom", prefix]
        is_built = all(_bind(path, folder + path) for path in paths if os.path.lexists(path))
        os.mkdir(f"{folder}/work")
    except OSError:
        is_built = False
    options = f"size={size},nr_inodes=1000,mode=777".encode()
    if (
        not is_built
        or not _set_read_only(folder)
        or not _call("mount", b"tmpfs", f"{folder}/work".encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options)
    ):
        _call("umount2", folder.encode(), MNT_DETACH)
        return False
    os.chroot(folder)
    os.chdir("/work")
    return True


def _bind(path: str, target: str) -> bool:
    """Show a file or folder at the same place in the new root; a link is copied."""
    if os.path.lexists(target):
        return True  # inside a folder that is there already
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return True
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT, 0o666))
    return _call("mount", path.encode(), target.encode(), None, MS_BIND | MS_REC, None)


def _set_read_only(folder: str) -> bool:
    """Make all mounts below a folder read-only (mount_setattr, Linux 5.12)."""
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    return _call("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, folder.encode(), AT_RECURSIVE, ctypes.byref(attributes), 32)


def filter_system_calls() -> bool:
    """Deny `DENIED_CALLS` to this process, for good: it starts no processes, signals none and opens no sockets."""
    machine = MACHINES.get(platform.machine())
    if machine is None:
        return False
    column, architecture, clone = machine
    numbers = [pair[column] for pair in DENIED_CALLS.values() if pair[column] is not None]
    # Instructions of the Berkeley packet filter: code, jumps if true and if false, operand.
    load, jump_equal, jump_not_less, jump_bits, leave = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, deny, missing = 0x7FFF0000, 0x50000 | EPERM, 0x50000 | ENOSYS
    steps = [(load, 0, 0, 4), (jump_equal, 1, 0, architecture), (leave, 0, 0, deny), (load, 0, 0, 0)]
    steps += [(jump_not_less, 0, 1, FIRST_X32_CALL), (leave, 0, 0, deny)]
    steps += [(jump_equal, 0, 1, CLONE3), (leave, 0, 0, missing)]  # so that threads are started by clone
    for number in numbers:
        steps += [(jump_equal, 0, 1, number or 0), (leave, 0, 0, deny)]
    steps += [(jump_equal, 1, 0, clone), (leave, 0, 0, allow)]
    steps += [(load, 0, 0, 16), (jump_bits, 1, 0, CLONE_THREAD), (leave, 0, 0, deny), (leave, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)))
    if not control_process(PR_SET_NO_NEW_PRIVS, 1):
        return False
    return _call("prctl", PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0)


def control_process(option: int, value: int) -> bool:
    """Set an option of this process by ``prctl``; False: the kernel refuses."""
    return _call("prctl", option, value, 0, 0, 0)


def _call(name: str, *arguments: Any) -> bool:
    """Call a function of the C library; return whether it exists and succeeds."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is None:
        return False
    typed = [ctypes.c_ulong(value) if isinstance(value, int) and value >= 0 else value for value in arguments]
    return bool(function(*typed) == 0)


def is_public(path: str) -> bool:
    """Whether every user of the machine can reach and run the file."""
    while os.stat(path).st_mode & 0o001:
        if path == "/":
            return True
        path = os.path.dirname(path)
    return False
