// A libnvidia-ml.so.1 for tests. It has two GPUs, one cut into two MIG devices
// with a hole between them. Like an old driver it lacks many calls; with -DNEW
// it has more, and with -DPENDING a memory row to replace. -DVERSION="…" is what
// it says it is. With -DBROKEN it does not find the kernel's part, with -DSTUBBORN
// it cannot be closed.

#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef unsigned int number;
typedef unsigned long long bits;

enum { SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9, TIMEOUT, UNKNOWN = 999 };

struct device { int index; const char *uuid; struct device *parent; };

static struct device GPUs[2] = {
	{0, "GPU-00000000-0000-0000-0000-000000000000", NULL},
	{1, "GPU-11111111-1111-1111-1111-111111111111", NULL},
};
static struct device partitions[3] = {
	{0, "MIG-00000000-0000-0000-0000-0000000000a0", &GPUs[1]},
	{-1, NULL, NULL},
	{2, "MIG-00000000-0000-0000-0000-0000000000a2", &GPUs[1]},
};
static int opened, sets, registered, fired;

#define OPEN if (opened == 0) return UNINITIALIZED

// The text is made anew by every call, as the driver's is.
static int copy(char *to, number length, const char *text)
{
	snprintf(to, length, "%s", text);
	return SUCCESS;
}

int nvmlInit_v2(void)
{
#ifdef BROKEN
	return DRIVER_NOT_LOADED;
#endif
	opened++;
	return SUCCESS;
}
int nvmlShutdown(void)
{
	OPEN;
#ifdef STUBBORN
	return UNKNOWN;
#endif
	opened--;
	return SUCCESS;
}
int nvmlSystemGetDriverVersion(char *a, number b) { OPEN; return copy(a, b, VERSION); }
int nvmlDeviceGetCount_v2(number *a) { OPEN; *a = 2; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(number a, struct device **b)
{
	OPEN;
	if (a >= 2) return INVALID_ARGUMENT;
	*b = &GPUs[a];
	return SUCCESS;
}
int nvmlDeviceGetUUID(struct device *a, char *b, number c) { OPEN; return copy(b, c, a->uuid); }
int nvmlDeviceGetName(struct device *a, char *b, number c)
{
	OPEN;
	return copy(b, c, a->parent ? "NVIDIA Fake A100-SXM4-40GB MIG 1g.5gb" : "NVIDIA Fake A100-SXM4-40GB");
}
int nvmlDeviceGetMinorNumber(struct device *a, number *b) { OPEN; *b = a->index; return SUCCESS; }

struct pci { char legacy[16]; number domain, bus, device, id, subsystem; char text[32]; };
// Like the call of old drivers it leaves the long text empty.
int nvmlDeviceGetPciInfo_v2(struct device *a, struct pci *b)
{
	OPEN;
	memset(b, 0, sizeof *b);
	b->domain = a->index == 0 ? 0 : 0x10000;
	b->bus = 0x3b + a->index;
	b->id = 0x20b010de;
	return SUCCESS;
}
struct memory { bits total, free, used; };
int nvmlDeviceGetMemoryInfo(struct device *a, struct memory *b)
{
	OPEN;
	*b = (struct memory){40ull << 30, 39ull << 30, 1ull << 30};
	return SUCCESS;
}
int nvmlDeviceGetArchitecture(struct device *a, number *b) { OPEN; *b = 7; return SUCCESS; }
int nvmlDeviceGetCudaComputeCapability(struct device *a, int *b, int *c) { OPEN; *b = 8; *c = 0; return SUCCESS; }
int nvmlDeviceGetTemperature(struct device *a, number b, number *c)
{
	OPEN;
	if (b != 0) return INVALID_ARGUMENT;
	*c = 30 + a->index;
	return a->parent ? NOT_SUPPORTED : SUCCESS;
}
int nvmlDeviceGetVirtualizationMode(struct device *a, number *b) { OPEN; *b = a->index; return SUCCESS; }
int nvmlDeviceGetMigMode(struct device *a, number *b, number *c) { OPEN; *b = a->index; *c = 0; return SUCCESS; }
int nvmlDeviceGetMaxMigDeviceCount(struct device *a, number *b) { OPEN; *b = a->index == 1 ? 4 : 0; return SUCCESS; }
int nvmlDeviceGetMigDeviceHandleByIndex(struct device *a, number b, struct device **c)
{
	OPEN;
	if (b >= 4) return INVALID_ARGUMENT;
	if (a->index != 1 || b >= 3 || partitions[b].uuid == NULL) return NOT_FOUND;
	*c = &partitions[b];
	return SUCCESS;
}
int nvmlDeviceGetGpuInstanceId(struct device *a, number *b) { OPEN; *b = 7 + a->index; return SUCCESS; }
int nvmlDeviceGetComputeInstanceId(struct device *a, number *b) { OPEN; *b = 0; return SUCCESS; }
int nvmlDeviceGetGpuInstanceById(struct device *a, number b, struct device **c)
{
	OPEN;
	if (b != 7 && b != 9) return NOT_FOUND;
	*c = &partitions[b - 7];
	return SUCCESS;
}
struct instance { void *device; number id, profile, start, size; };
int nvmlGpuInstanceGetInfo(struct device *a, struct instance *b)
{
	OPEN;
	*b = (struct instance){&GPUs[1], 7 + a->index, 19, a->index, 1};
	return SUCCESS;
}
#ifdef NEW
struct named { number version, id, p2p, slices, count, sm, copy, decode, encode, jpeg, ofa; bits memory; char name[96]; };
int nvmlDeviceGetGpuInstanceProfileInfoV(struct device *a, number b, struct named *c)
{
	OPEN;
	if (b > 3) return INVALID_ARGUMENT;
	if (b != 0) return NOT_SUPPORTED;
	c->id = 19; c->slices = 1; c->count = 7; c->memory = 4864;
	return copy(c->name, sizeof c->name, "MIG 1g.5gb");
}
#else
struct plain { number id, p2p, slices, count, sm, copy, decode, encode, jpeg, ofa; bits memory; };
int nvmlDeviceGetGpuInstanceProfileInfo(struct device *a, number b, struct plain *c)
{
	OPEN;
	if (b > 3) return INVALID_ARGUMENT;
	if (b != 0) return NOT_SUPPORTED;
	memset(c, 0, sizeof *c);
	c->id = 19; c->slices = 1; c->count = 7; c->memory = 4864;
	return SUCCESS;
}
#endif
int nvmlGpuInstanceGetComputeInstanceById(struct device *a, number b, struct device **c)
{
	OPEN;
	if (b != 0) return NOT_FOUND;
	*c = a;
	return SUCCESS;
}
struct compute { void *device, *instance; number id, profile, start, size; };
int nvmlComputeInstanceGetInfo_v2(struct device *a, struct compute *b)
{
	OPEN;
	*b = (struct compute){a, a, 0, 0, 0, 1};
	return SUCCESS;
}
int nvmlEventSetCreate(int **a) { OPEN; *a = &sets; sets++; return SUCCESS; }
int nvmlDeviceGetSupportedEventTypes(struct device *a, bits *b) { OPEN; *b = 0x1b; return SUCCESS; }
int nvmlDeviceRegisterEvents(struct device *a, bits b, int *c)
{
	OPEN;
	if (a->parent) return NOT_SUPPORTED;
	registered++;
	return SUCCESS;
}
// The first wait has an XID of GPU 1, partition 9; the others have nothing.
// An old driver's wait leaves the partition as it was: 0.
struct event { void *device; bits type, data; number gi, ci; };
#ifdef NEW
int nvmlEventSetWait_v2(int *a, struct event *b, number c)
#else
int nvmlEventSetWait(int *a, struct event *b, number c)
#endif
{
	OPEN;
	if (c == 0) return INVALID_ARGUMENT;
	if (!registered || fired++) {
		usleep(c * 1000);
		return TIMEOUT;
	}
	b->device = &GPUs[1];
	b->type = 8;
	b->data = 94;
#ifdef NEW
	b->gi = 9;
	b->ci = 0;
#endif
	return SUCCESS;
}
int nvmlEventSetFree(int *a) { OPEN; sets--; return SUCCESS; }
#ifdef NEW
struct process { number pid; bits memory; number gi, ci; };
int nvmlDeviceGetComputeRunningProcesses_v3(struct device *a, number *b, struct process *c)
{
	OPEN;
	if (*b < 2) return 7; // INSUFFICIENT_SIZE
	c[0] = (struct process){4711, 1 << 20, 0, 0};
	c[1] = (struct process){4712, ~0ull, 0, 0};
	*b = 2;
	return SUCCESS;
}
struct rates { number gpu, memory; };
int nvmlDeviceGetUtilizationRates(struct device *a, struct rates *b)
{
	OPEN;
	if (a->index == 1) return NOT_SUPPORTED;
	*b = (struct rates){42, 7};
	return SUCCESS;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(struct device *a, bits *b) { OPEN; *b = 0x44; return SUCCESS; }
// GPU 0 has samples at 1000 and 2000. A caller who has seen the first is told
// that there is one, and then that there are two: one came in between.
struct sample { number pid; bits time; number sm, memory, encoder, decoder; };
int nvmlDeviceGetProcessUtilization(struct device *a, struct sample *b, number *c, bits d)
{
	OPEN;
	if (a->index == 1) return NOT_SUPPORTED;
	if (d >= 2000) return NOT_FOUND;
	if (d == 1500) { *c = 0; return 7; }
	number count = d >= 1000 ? 1 : 2;
	if (b == NULL) { *c = count; return 7; } // INSUFFICIENT_SIZE
	if (count == 1) { *c = 2; return 7; }
	b[0] = (struct sample){4711, 1000, 30, 3, 0, 0};
	b[1] = (struct sample){4711, 2000, 50, 5, 0, 0};
	return SUCCESS;
}
int nvmlDeviceGetRemappedRows(struct device *a, number *b, number *c, number *d, number *e)
{
	OPEN;
	if (a->index == 1) return NOT_SUPPORTED;
	*b = 1; *c = 2; *d = 0; *e = 0;
#ifdef PENDING
	*d = 1;
#endif
	return SUCCESS;
}
#endif
#ifdef NEW
int nvmlDeviceGetGraphicsRunningProcesses_v3(struct device *a, number *b, struct process *c) { OPEN; *b = 0; return SUCCESS; }
int nvmlDeviceGetMPSComputeRunningProcesses_v3(struct device *a, number *b, struct process *c)
{
	OPEN;
	if (*b < 1) return 7; // INSUFFICIENT_SIZE
	c[0] = (struct process){4713, 0, 0, 0};
	*b = 1;
	return SUCCESS;
}
// GPU 0 would have to be reset for another mode; GPU 1 lets nobody.
int nvmlDeviceSetMigMode(struct device *a, number b, int *c)
{
	OPEN;
	*c = SUCCESS;
	if (b > 1) return INVALID_ARGUMENT;
	if (a->index == 1) return 4; // NO_PERMISSION
	*c = b ? 16 : 19; // RESET_REQUIRED, IN_USE
	return SUCCESS;
}
struct placement { number start, size; };
int nvmlDeviceGetGpuInstancePossiblePlacements_v2(struct device *a, number b, struct placement *c, number *d)
{
	OPEN;
	if (b != 19) return INVALID_ARGUMENT;
	for (number i = 0; c != NULL && i < *d; i++)
		c[i] = (struct placement){i, 1};
	*d = 7;
	return SUCCESS;
}
int nvmlDeviceGetGpuInstances(struct device *a, number b, struct device **c, number *d)
{
	OPEN;
	if (b != 19) return INVALID_ARGUMENT;
	if (*d < 7) return 7;
	c[0] = &partitions[0];
	c[1] = &partitions[2];
	*d = 2;
	return SUCCESS;
}
// A new instance lies in the hole; the others are in use.
int nvmlDeviceCreateGpuInstanceWithPlacement(struct device *a, number b, const struct placement *c, struct device **d)
{
	OPEN;
	if (b != 19 || c->size != 1) return INVALID_ARGUMENT;
	if (c->start != 1) return 23; // INSUFFICIENT_RESOURCES
	*d = &partitions[1];
	return SUCCESS;
}
int nvmlGpuInstanceDestroy(struct device *a) { OPEN; return a == &partitions[1] ? SUCCESS : 19; }
struct part { number id, slices, count, sm, copy, decode, encode, jpeg, ofa; };
int nvmlGpuInstanceGetComputeInstanceProfileInfo(struct device *a, number b, number c, struct part *d)
{
	OPEN;
	if (b > 8 || c != 0) return INVALID_ARGUMENT;
	if (b != 0) return NOT_SUPPORTED;
	*d = (struct part){5, 1, 1};
	return SUCCESS;
}
int nvmlGpuInstanceGetComputeInstances(struct device *a, number b, struct device **c, number *d)
{
	OPEN;
	if (b != 5) return INVALID_ARGUMENT;
	c[0] = a;
	*d = 1;
	return SUCCESS;
}
int nvmlGpuInstanceCreateComputeInstance(struct device *a, number b, struct device **c)
{
	OPEN;
	if (b != 5) return INVALID_ARGUMENT;
	*c = a;
	return SUCCESS;
}
int nvmlComputeInstanceDestroy(struct device *a) { OPEN; return a == &partitions[1] ? SUCCESS : 19; }
#endif
