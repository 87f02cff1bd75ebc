"""Checking that a resource can do what its user needs, before anything is allocated."""

from __future__ import annotations

from streamflow.memory.resource import DeviceMemoryResource, checked_resource

__all__ = [
    "device_async_resource_ref",
    "device_resource_ref",
    "host_async_resource_ref",
    "host_device_async_resource_ref",
    "host_device_resource_ref",
    "host_resource_ref",
    "require",
]


def require(
    resource: DeviceMemoryResource,
    *,
    device: bool | None = None,
    host: bool | None = None,
    stream_ordered: bool | None = None,
) -> DeviceMemoryResource:
    """``resource`` itself, if it has the properties asked for.

    Parameters
    ----------
    resource : DeviceMemoryResource
    device : bool, optional
        Whether the device must be able to touch the memory (True), or must not (False).
    host : bool, optional
        The same for the host.
    stream_ordered : bool, optional
        Whether frees must return at once and be handed on in stream order, or must not.

    Returns
    -------
    DeviceMemoryResource

    Raises
    ------
    TypeError
        Not a resource; None is none.
    ValueError
        Names every property that is not as asked for.
    """
    checked_resource(resource)
    asked = (
        ("device accessible", device, resource.is_device_accessible),
        ("host accessible", host, resource.is_host_accessible),
        ("stream ordered", stream_ordered, resource.is_stream_ordered),
    )
    wrong = [
        f"is not {name}" if wanted else f"is {name}"
        for name, wanted, has in asked
        if wanted is not None and bool(wanted) is not bool(has)
    ]
    if wrong:
        raise ValueError(f"{resource!r} {' and '.join(wrong)}")
    return resource


def device_resource_ref(resource: DeviceMemoryResource) -> DeviceMemoryResource:
    """:func:`require` with ``device=True``.

    Parameters
    ----------
    resource : DeviceMemoryResource
    """
    return require(resource, device=True)


def device_async_resource_ref(resource: DeviceMemoryResource) -> DeviceMemoryResource:
    """:func:`require` with ``device=True, stream_ordered=True``.

    Parameters
    ----------
    resource : DeviceMemoryResource
    """
    return require(resource, device=True, stream_ordered=True)


def host_resource_ref(resource: DeviceMemoryResource) -> DeviceMemoryResource:
    """:func:`require` with ``host=True``.

    Parameters
    ----------
    resource : DeviceMemoryResource
    """
    return require(resource, host=True)


def host_async_resource_ref(resource: DeviceMemoryResource) -> DeviceMemoryResource:
    """:func:`require` with ``host=True, stream_ordered=True``.

    Parameters
    ----------
    resource : DeviceMemoryResource
    """
    return require(resource, host=True, stream_ordered=True)


def host_device_resource_ref(resource: DeviceMemoryResource) -> DeviceMemoryResource:
    """:func:`require` with ``host=True, device=True``.

    Parameters
    ----------
    resource : DeviceMemoryResource
    """
    return require(resource, host=True, device=True)


def host_device_async_resource_ref(resource: DeviceMemoryResource) -> DeviceMemoryResource:
    """:func:`require` with ``host=True, device=True, stream_ordered=True``.

    Parameters
    ----------
    resource : DeviceMemoryResource
    """
    return require(resource, host=True, device=True, stream_ordered=True)
