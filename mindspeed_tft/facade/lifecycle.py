"""The functions of `mindio_ttp` that begin and end protection. Signatures are those that its adaptors call."""

from __future__ import annotations

from mindspeed_tft.facade.process import process
from mindspeed_tft.facade.words import FacadeError, NotServed


def tft_init_controller(
    rank: int, world_size: int, enable_local_copy: bool, enable_arf: bool = False, enable_zit: bool = False
) -> None:
    """Rank 0 announces that it starts the job's controller. `enable_arf` is asked of the processors.

    Raises:
        FacadeError: a rank or world that cannot be.
        NotServed: rank -1 or another one than 0, local copies, elastic training.
    """
    process().init_controller(rank, world_size, enable_local_copy, enable_zit)


def tft_start_controller(bind_ip: str, port: int, enable_tls: bool = True, tls_info: str = "") -> None:
    """The controller is a process of its own, and comes up with `tft_start_processor`. On a single host it opens no
    port; with several it listens on `port` (or tft-controller-port), and needs tft-tls-dir or tft-insecure.

    Raises:
        FacadeError: no such port, or `tft_init_controller` was not called.
        NotServed: keys in `tls_info`.
    """
    _check_tls("tft_start_controller", bind_ip, enable_tls, tls_info)
    process().start_controller(port)


def tft_init_processor(
    rank: int,
    world_size: int,
    enable_local_copy: bool,
    enable_tls: bool = True,
    tls_info: str = "",
    enable_uce: bool = True,
    enable_arf: bool = False,
    enable_zit: bool = False,
) -> None:
    """This process is a rank. `enable_uce`: faults of memory and links are repaired online; `enable_arf`: dead ones
    are replaced by new processes, which needs `tftrun`.

    Raises:
        FacadeError: a rank or world that cannot be, or `mindspeed_tft.adaptor` is imported as well.
        NotServed: local copies, elastic training, keys in `tls_info`.
    """
    _check_tls("tft_init_processor", "processor", enable_tls, tls_info)
    process().init_processor(rank, world_size, enable_local_copy, enable_uce, enable_arf, enable_zit)


def tft_start_processor(master_ip: str, port: int, local_ip: str = "") -> None:
    """Start or find the control plane. `local_ip` is not needed: a host opens its own connection outwards.

    Raises:
        FacadeError: see `Process.start_processor`.
        SystemExit: a setting has to be corrected.
    """
    if not master_ip:
        raise FacadeError("tft_start_processor: the address of the controller is empty")
    process().start_processor(master_ip, port)


def tft_destroy_controller() -> None:
    """The controller ends by itself when the job does: its ranks say goodbye, or are gone."""


def tft_destroy_processor() -> None:
    """This rank leaves in the ordinary way.

    Raises:
        FacadeError: it never took part.
    """
    process().destroy_processor()


def set_mindio_export_version(version: str) -> None:
    """Which framework calls: "MindSpeed" or "MindSpeed-LLM". Their clean callback is called before a dump, too.

    Raises:
        FacadeError: neither of them.
    """
    process().set_export(version)


def _check_tls(name: str, address: str, enable_tls: bool, tls_info: str) -> None:
    # enable_tls itself asks for what is done anyway: no port on one host, certificates between hosts.
    if not address:
        raise FacadeError(f"{name}: the address is empty")
    if tls_info:
        reason = "the control plane reads keys and certificates from a directory, and never from a text"
        raise NotServed(f"{name} with keys in tls_info", reason, "set tft-tls-dir in the facade's configuration")
