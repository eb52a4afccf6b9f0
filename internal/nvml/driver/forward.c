//go:build cgo

// go-nvml calls NVML's functions by name and leaves it to the loader to find
// them in the library that it has opened. That has two consequences which a
// program that runs for months cannot have: a function that the driver is too
// old for ends the process, and names once found stay bound to the library they
// were found in, so that a new version of the driver is never called. Here the
// names are functions of our own instead. Each calls the function of that name
// in the library that was opened last, or answers FUNCTION_NOT_FOUND.
//
// They are hidden, so that the library itself does not find them when it calls
// its own functions.

#include <dlfcn.h>
#include <stddef.h>

typedef void *handle;
typedef unsigned int number;
typedef unsigned long long bits;

// Every function of NVML that the Go code of this package reaches, in all its
// versions, with parameters that are passed as those in nvml.h are.
#define FUNCTIONS(F) \
	F(nvmlInit, (void), ()) \
	F(nvmlInit_v2, (void), ()) \
	F(nvmlShutdown, (void), ()) \
	F(nvmlSystemGetDriverVersion, (char *a, number b), (a, b)) \
	F(nvmlSystemGetCudaDriverVersion, (int *a), (a)) \
	F(nvmlSystemGetConfComputeState, (void *a), (a)) \
	F(nvmlSystemGetConfComputeGpusReadyState, (void *a), (a)) \
	F(nvmlDeviceGetCount, (number *a), (a)) \
	F(nvmlDeviceGetCount_v2, (number *a), (a)) \
	F(nvmlDeviceGetHandleByIndex, (number a, handle *b), (a, b)) \
	F(nvmlDeviceGetHandleByIndex_v2, (number a, handle *b), (a, b)) \
	F(nvmlDeviceGetUUID, (handle a, char *b, number c), (a, b, c)) \
	F(nvmlDeviceGetMinorNumber, (handle a, number *b), (a, b)) \
	F(nvmlDeviceGetPciInfo, (handle a, void *b), (a, b)) \
	F(nvmlDeviceGetPciInfo_v2, (handle a, void *b), (a, b)) \
	F(nvmlDeviceGetPciInfo_v3, (handle a, void *b), (a, b)) \
	F(nvmlDeviceGetName, (handle a, char *b, number c), (a, b, c)) \
	F(nvmlDeviceGetMemoryInfo, (handle a, void *b), (a, b)) \
	F(nvmlDeviceGetArchitecture, (handle a, number *b), (a, b)) \
	F(nvmlDeviceGetBrand, (handle a, int *b), (a, b)) \
	F(nvmlDeviceGetCudaComputeCapability, (handle a, int *b, int *c), (a, b, c)) \
	F(nvmlDeviceGetTemperature, (handle a, number b, number *c), (a, b, c)) \
	F(nvmlDeviceGetTemperatureThreshold, (handle a, number b, number *c), (a, b, c)) \
	F(nvmlDeviceGetMarginTemperature, (handle a, void *b), (a, b)) \
	F(nvmlDeviceGetComputeRunningProcesses, (handle a, number *b, void *c), (a, b, c)) \
	F(nvmlDeviceGetComputeRunningProcesses_v2, (handle a, number *b, void *c), (a, b, c)) \
	F(nvmlDeviceGetComputeRunningProcesses_v3, (handle a, number *b, void *c), (a, b, c)) \
	F(nvmlDeviceGetGraphicsRunningProcesses, (handle a, number *b, void *c), (a, b, c)) \
	F(nvmlDeviceGetGraphicsRunningProcesses_v2, (handle a, number *b, void *c), (a, b, c)) \
	F(nvmlDeviceGetGraphicsRunningProcesses_v3, (handle a, number *b, void *c), (a, b, c)) \
	F(nvmlDeviceGetMPSComputeRunningProcesses, (handle a, number *b, void *c), (a, b, c)) \
	F(nvmlDeviceGetMPSComputeRunningProcesses_v2, (handle a, number *b, void *c), (a, b, c)) \
	F(nvmlDeviceGetMPSComputeRunningProcesses_v3, (handle a, number *b, void *c), (a, b, c)) \
	F(nvmlDeviceGetUtilizationRates, (handle a, void *b), (a, b)) \
	F(nvmlDeviceGetProcessUtilization, (handle a, void *b, number *c, bits d), (a, b, c, d)) \
	F(nvmlDeviceGetCurrentClocksThrottleReasons, (handle a, bits *b), (a, b)) \
	F(nvmlDeviceGetPowerUsage, (handle a, number *b), (a, b)) \
	F(nvmlDeviceGetTotalEnergyConsumption, (handle a, bits *b), (a, b)) \
	F(nvmlDeviceGetMemoryErrorCounter, (handle a, number b, number c, number d, bits *e), (a, b, c, d, e)) \
	F(nvmlDeviceGetFieldValues, (handle a, int b, void *c), (a, b, c)) \
	F(nvmlDeviceGetRemappedRows, (handle a, number *b, number *c, number *d, number *e), (a, b, c, d, e)) \
	F(nvmlDeviceGetRetiredPagesPendingStatus, (handle a, number *b), (a, b)) \
	F(nvmlDeviceGetTopologyCommonAncestor, (handle a, handle b, number *c), (a, b, c)) \
	F(nvmlDeviceGetNvLinkState, (handle a, number b, number *c), (a, b, c)) \
	F(nvmlDeviceGetNvLinkRemotePciInfo, (handle a, number b, void *c), (a, b, c)) \
	F(nvmlDeviceGetNvLinkRemotePciInfo_v2, (handle a, number b, void *c), (a, b, c)) \
	F(nvmlDeviceGetGpuFabricInfo, (handle a, void *b), (a, b)) \
	F(nvmlDeviceGetGpuFabricInfoV, (handle a, void *b), (a, b)) \
	F(nvmlDeviceGetVirtualizationMode, (handle a, number *b), (a, b)) \
	F(nvmlDeviceGetComputeMode, (handle a, number *b), (a, b)) \
	F(nvmlDeviceSetComputeMode, (handle a, number b), (a, b)) \
	F(nvmlDeviceGetMigMode, (handle a, number *b, number *c), (a, b, c)) \
	F(nvmlDeviceGetMaxMigDeviceCount, (handle a, number *b), (a, b)) \
	F(nvmlDeviceGetMigDeviceHandleByIndex, (handle a, number b, handle *c), (a, b, c)) \
	F(nvmlDeviceGetGpuInstanceId, (handle a, number *b), (a, b)) \
	F(nvmlDeviceGetComputeInstanceId, (handle a, number *b), (a, b)) \
	F(nvmlDeviceGetAttributes, (handle a, void *b), (a, b)) \
	F(nvmlDeviceGetAttributes_v2, (handle a, void *b), (a, b)) \
	F(nvmlDeviceGetGpuInstanceById, (handle a, number b, handle *c), (a, b, c)) \
	F(nvmlDeviceGetGpuInstanceProfileInfo, (handle a, number b, void *c), (a, b, c)) \
	F(nvmlDeviceGetGpuInstanceProfileInfoV, (handle a, number b, void *c), (a, b, c)) \
	F(nvmlGpuInstanceGetInfo, (handle a, void *b), (a, b)) \
	F(nvmlGpuInstanceGetComputeInstanceById, (handle a, number b, handle *c), (a, b, c)) \
	F(nvmlComputeInstanceGetInfo, (handle a, void *b), (a, b)) \
	F(nvmlComputeInstanceGetInfo_v2, (handle a, void *b), (a, b)) \
	F(nvmlDeviceSetMigMode, (handle a, number b, int *c), (a, b, c)) \
	F(nvmlDeviceGetGpuInstancePossiblePlacements, (handle a, number b, void *c, number *d), (a, b, c, d)) \
	F(nvmlDeviceGetGpuInstancePossiblePlacements_v2, (handle a, number b, void *c, number *d), (a, b, c, d)) \
	F(nvmlDeviceGetGpuInstances, (handle a, number b, handle *c, number *d), (a, b, c, d)) \
	F(nvmlDeviceCreateGpuInstanceWithPlacement, (handle a, number b, const void *c, handle *d), (a, b, c, d)) \
	F(nvmlGpuInstanceDestroy, (handle a), (a)) \
	F(nvmlGpuInstanceGetComputeInstanceProfileInfo, (handle a, number b, number c, void *d), (a, b, c, d)) \
	F(nvmlGpuInstanceGetComputeInstances, (handle a, number b, handle *c, number *d), (a, b, c, d)) \
	F(nvmlGpuInstanceCreateComputeInstance, (handle a, number b, handle *c), (a, b, c)) \
	F(nvmlComputeInstanceDestroy, (handle a), (a)) \
	F(nvmlEventSetCreate, (handle *a), (a)) \
	F(nvmlDeviceGetSupportedEventTypes, (handle a, bits *b), (a, b)) \
	F(nvmlDeviceRegisterEvents, (handle a, bits b, handle c), (a, b, c)) \
	F(nvmlEventSetWait, (handle a, void *b, number c), (a, b, c)) \
	F(nvmlEventSetWait_v2, (handle a, void *b, number c), (a, b, c)) \
	F(nvmlEventSetFree, (handle a), (a))

enum { functionNotFound = 13 };

#define FORWARD(name, parameters, arguments) \
	static void *at_##name; \
	__attribute__((visibility("hidden"))) int name parameters \
	{ \
		int(*function) parameters = __atomic_load_n(&at_##name, __ATOMIC_ACQUIRE); \
		return function ? function arguments : functionNotFound; \
	}
FUNCTIONS(FORWARD)

// virgate_load opens the library; NULL, with the loader's words in *why, when
// that cannot be. The caller stays on its thread until it has copied them.
void *virgate_load(const char *path, const char **why)
{
	void *library = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
	if (library == NULL)
		*why = dlerror();
	return library;
}

// virgate_forward makes the library the one that is called.
void virgate_forward(void *library)
{
#define BIND(name, parameters, arguments) \
	__atomic_store_n(&at_##name, dlsym(library, #name), __ATOMIC_RELEASE);
	FUNCTIONS(BIND)
}
