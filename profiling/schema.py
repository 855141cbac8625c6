"""Tables and columns of an Nsight Systems sqlite export: what the audit reads and fixtures write.

Names and types are those of real exports, schema versions 3.24 and 3.25. `!` marks NOT NULL. Nsight
creates a table only when it has a row for it.
"""

from __future__ import annotations

VERSION = (3, 25)

_ACTIVITY = """start INTEGER!, end INTEGER!, deviceId INTEGER!, contextId INTEGER!,
    greenContextId INTEGER, streamId INTEGER!, correlationId INTEGER, globalPid INTEGER"""

_TABLES = {
    "StringIds": "id INTEGER!, value TEXT!",
    "CUPTI_ACTIVITY_KIND_KERNEL": _ACTIVITY
    + """, demangledName INTEGER!, shortName INTEGER!, mangledName INTEGER, launchType INTEGER,
        cacheConfig INTEGER, registersPerThread INTEGER!, gridX INTEGER!, gridY INTEGER!,
        gridZ INTEGER!, blockX INTEGER!, blockY INTEGER!, blockZ INTEGER!,
        staticSharedMemory INTEGER!, dynamicSharedMemory INTEGER!, localMemoryPerThread INTEGER!,
        localMemoryTotal INTEGER!, gridId INTEGER!, sharedMemoryExecuted INTEGER,
        graphNodeId INTEGER, sharedMemoryLimitConfig INTEGER, qmdBulkReleaseDone INTEGER,
        qmdPreexitDone INTEGER, qmdLastCtaDone INTEGER, graphId INTEGER, clusterX INTEGER,
        clusterY INTEGER, clusterZ INTEGER, clusterSchedulingPolicy INTEGER,
        maxPotentialClusterSize INTEGER, maxActiveClusters INTEGER,
        sharedMemoryRequestedPercentage INTEGER, tensorSizeMinusOneElements TEXT!""",
    "CUPTI_ACTIVITY_KIND_MEMCPY": _ACTIVITY
    + """, bytes INTEGER!, copyKind INTEGER!, deprecatedSrcId INTEGER, srcKind INTEGER,
        dstKind INTEGER, srcDeviceId INTEGER, srcContextId INTEGER, dstDeviceId INTEGER,
        dstContextId INTEGER, migrationCause INTEGER, graphNodeId INTEGER, virtualAddress INTEGER,
        copyCount INTEGER""",
    "CUPTI_ACTIVITY_KIND_MEMSET": _ACTIVITY
    + ", value INTEGER!, bytes INTEGER!, graphNodeId INTEGER, memKind INTEGER",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": _ACTIVITY
    + """, deprecatedSyncType INTEGER, syncType INTEGER!, eventId INTEGER!, eventSyncId INTEGER""",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": _ACTIVITY + ", graphId INTEGER!, graphExecId INTEGER!",
    "CUPTI_ACTIVITY_KIND_RUNTIME": """start INTEGER!, end INTEGER!, eventClass INTEGER!,
        globalTid INTEGER, correlationId INTEGER, nameId INTEGER!, returnValue INTEGER!,
        callchainId INTEGER""",
    "CUDA_GRAPH_NODE_EVENTS": """start INTEGER!, end INTEGER!, eventClass INTEGER!,
        globalTid INTEGER, nameId INTEGER!, graphNodeId INTEGER!, originalGraphNodeId INTEGER""",
    "NVTX_EVENTS": """start INTEGER!, end INTEGER, eventType INTEGER!, rangeId INTEGER,
        category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER,
        textId INTEGER, domainId INTEGER, uint64Value INTEGER, int64Value INTEGER,
        doubleValue REAL, uint32Value INTEGER, int32Value INTEGER, floatValue REAL,
        jsonTextId INTEGER, jsonText TEXT, binaryData TEXT""",
    "META_DATA_CAPTURE": "name TEXT!, value TEXT",
    "META_DATA_EXPORT": "name TEXT!, value TEXT",
    "DIAGNOSTIC_EVENT": """timestamp INTEGER!, timestampType INTEGER!, source INTEGER!,
        severity INTEGER!, text TEXT!, globalPid INTEGER""",
    "PROCESSES": "globalPid INTEGER, pid INTEGER, name TEXT",
    "ThreadNames": "nameId INTEGER!, priority INTEGER, globalTid INTEGER",
    "ENUM_CUDA_MEMCPY_OPER": "id INTEGER!, name TEXT, label TEXT",
    "ENUM_CUDA_MEM_KIND": "id INTEGER!, name TEXT, label TEXT",
}

# NVTX_EVENTS.eventType
PUSH_POP, START_END, DOMAIN = 59, 60, 75
# copyKind of copies that end in host memory: device, array and unified memory to host.
TO_HOST = (2, 4, 12)
# dstKind: page-locked memory, the only kind that a copy can reach while the host goes on.
PINNED = 1
_COPY_KINDS = {1: "Host-to-Device", 2: "Device-to-Host", 8: "Device-to-Device", 10: "Peer-to-Peer"}
_MEMORY_KINDS = {0: "Pageable", 1: "Pinned", 2: "Device", 4: "Managed"}
ENUMS = {"ENUM_CUDA_MEMCPY_OPER": _COPY_KINDS, "ENUM_CUDA_MEM_KIND": _MEMORY_KINDS}


def parts(table: str) -> list[str]:
    """A table's columns in order, each as `name TYPE` with `!` for NOT NULL."""
    return [part.strip() for part in _TABLES[table].split(",")]


def create_statement(table: str) -> str:
    """The table's CREATE statement."""
    quoted = [
        f'"{part.split()[0]}" {part.split()[1]}'.replace("!", " NOT NULL") for part in parts(table)
    ]
    return f"CREATE TABLE {table} ({', '.join(quoted)})"


def tables() -> list[str]:
    """Every table described here."""
    return list(_TABLES)
