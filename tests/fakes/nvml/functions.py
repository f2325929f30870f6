"""The NVML functions that the agent calls, and the return codes that NVML knows."""

CODES = [*range(1, 31), 999]
FUNCTIONS = [
    "nvmlInitWithFlags", "nvmlDeviceGetMinorNumber", "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetName",
    "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetAddressingMode",
    "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetTemperature", "nvmlDeviceGetClockInfo", "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetSamples", "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    "nvmlDeviceGetProcessUtilization", "nvmlDeviceGetProcessesUtilizationInfo",
    "nvmlDeviceGetAccountingMode", "nvmlDeviceGetAccountingBufferSize",
    "nvmlDeviceGetAccountingPids", "nvmlDeviceGetAccountingStats", "nvmlDeviceGetAccountingStats_v2",
    "nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId", "nvmlDeviceGetAttributes_v2",
    "nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmSampleGet", "nvmlGpmMigSampleGet",
    "nvmlGpmMetricsGet", "nvmlGpmSampleFree", "nvmlEventSetCreate", "nvmlEventSetWait_v2", "nvmlEventSetFree",
    "nvmlDeviceRegisterEvents", "nvmlDeviceGetSupportedEventTypes", "nvmlDeviceGetGpuInstanceById",
    "nvmlGpuInstanceGetInfo", "nvmlShutdown", "nvmlSystemGetDriverVersion", "*",
]  # fmt: skip
