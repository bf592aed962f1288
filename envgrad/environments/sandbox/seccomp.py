"""A filter of system calls that no program of ours needs and that have let others out of sandboxes.

The filter is classic BPF, eight bytes an instruction, as the kernel takes it (``man 2 seccomp``). Forbidden calls fail
with EPERM. A process of another architecture (32-bit calls on a 64-bit kernel) is killed.
"""

from __future__ import annotations

import errno
import platform
import struct

_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_X32 = 0x40000000
"""x86-64's second set of numbers: refused whole"""

_CALLS = {
    # name: (x86-64, aarch64)
    "ptrace": (101, 117),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "swapon": (167, 224),
    "reboot": (169, 142),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "setns": (308, 268),
    "perf_event_open": (298, 241),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "open_by_handle_at": (304, 265),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "open_tree": (428, 428),
    "mount_setattr": (442, 442),
}
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}


def seccomp_filter(machine: str | None = None) -> bytes | None:
    """The filter for this machine's architecture; None for one whose numbers are not listed here.

    Example:
        >>> len(seccomp_filter("x86_64")) % 8, seccomp_filter("riscv64")
        (0, None)
    """
    found = _ARCHITECTURES.get(machine or platform.machine())
    if found is None:
        return None
    architecture, column = found
    numbers = [numbers[column] for numbers in _CALLS.values()]
    program = [
        (_LOAD, 0, 0, 4),  # the architecture
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the call's number
    ]
    if column == 0:
        program.append((_JUMP_ABOVE, len(numbers) + 1, 0, _X32))
    program += [(_JUMP_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
