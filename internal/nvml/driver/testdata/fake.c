// A libnvidia-ml.so.1 for tests, which grants rights and answers as docs/internals/nvml.md says.
// It has two A100s; of the second, two partitions were made, with a hole between
// them, but not with -DWHOLE. What is made and destroyed lasts as long as the process.
//
// Over MIG a process has all rights with the capability SYS_ADMIN, and else those whose
// device nodes it may open. Where $NVIDIA_CAPS has a folder in the place of
// /dev/nvidia-caps, the capability does not count.
//
// With -DPROC="…", the /proc of a node whose capability nodes have the major number -DMAJOR=…, it
// is as hard as the kernel's part: each instance has a file below PROC that tells its node's
// number, nothing makes the node, and a compute instance takes an open descriptor of its GPU
// instance's node beside the rights, whatever the process's capabilities. The files PROC/open/nvidiactl and
// nvidiaN, where they are, stand for the driver's nodes, which nobody can open without its module: as NVML
// does, the library has the first open from the first nvmlInit on, and each other one from the look-up of
// its GPU, until the last nvmlShutdown.
//
// Like an old driver it lacks many calls; with -DNEW it has more. -DVERSION="…" is what
// it says it is. With -DBROKEN it does not find the kernel's part, and with
// -DMODULE="…", a file like /sys/module/nvidia/version, one of another version; with -DSTUBBORN it
// cannot be closed. With -DTROUBLE GPU 0 has processes and a memory row to replace, and GPU 1 is a
// virtual machine's and has an XID.

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

typedef unsigned int number;
typedef unsigned long long bits;

enum {
	SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 6, INSUFFICIENT_SIZE,
	DRIVER_NOT_LOADED = 9, TIMEOUT, RESET_REQUIRED = 16, LIB_RM_VERSION_MISMATCH = 18, IN_USE, INSUFFICIENT_RESOURCES = 23, ARGUMENT_VERSION_MISMATCH = 25, UNKNOWN = 999
};

#ifdef TROUBLE
enum { TROUBLED = 1 };
#else
enum { TROUBLED = 0 };
#endif

// A profile's size is in memory slots, its memory in MiB.
struct profile { number id, slices, size, count; bits memory; const char *name; };
enum { PROFILES = 5, SLOTS = 7, FIRST_GI = 7, FIRST_COMPUTE = 5 };
static const struct profile profiles[PROFILES] = { // In NVML's order.
	{19, 1, 1, 7, 4864, "1g.5gb"}, {14, 2, 2, 3, 9856, "2g.10gb"}, {9, 3, 4, 2, 19968, "3g.20gb"},
	{5, 4, 4, 1, 19968, "4g.20gb"}, {0, 7, 8, 1, 40192, "7g.40gb"},
};

// A GPU, or, with a parent, the memory slot with that index in which a GPU instance
// begins: the instance's handle is also that of its one compute instance and of the MIG
// device, and later that of others.
struct device {
	number index;
	struct device *parent;
	number mig, pending, minor, mode;
	const struct profile *profile; // NULL: no instance.
	number compute, serial, leaving;
};
static struct device slots[2][SLOTS], GPUs[2] = {{.index = 0, .minor = 0}, {.index = 1, .minor = 1}};
static number opened, sets, registered, fired, serials;
// lock guards opened and what it keeps open, because programs call the library from several threads.
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

#ifdef PROC
// The minor number of the capability's node: a fixed table, and the numbers of the GPUs.
static number capability(struct device *a, int compute)
{
	return 3 + 2 * (SLOTS * a->parent->minor + a->index) + compute;
}
// tell makes the file that says that the instance exists, or removes it.
static void tell(struct device *a, int compute, int exists)
{
	char path[4096];
	int length = snprintf(path, sizeof path, PROC "/driver/nvidia/capabilities/gpu%u/mig/gi%u%s/access",
		a->parent->minor, FIRST_GI + a->index, compute ? "/ci0" : "");
	char *name = path + length - strlen("/access");
	if (!exists) {
		unlink(path);
		*name = 0;
		rmdir(path);
		return;
	}
	for (char *at = path + strlen(PROC) + 1; (at = strchr(at, '/')) != NULL; at++) {
		*at = 0;
		mkdir(path, 0755);
		*at = '/';
	}
	FILE *file = fopen(path, "w");
	if (file == NULL) return;
	fprintf(file, "DeviceFileMinor: %u\nDeviceFileMode: %d\nDeviceFileModify: 1\n", capability(a, compute), 0444);
	fclose(file);
}
// As the driver's library does, this makes the node for itself and opens it. Without the kernel's
// driver that says ENXIO; a container's device cgroup says EPERM.
static int may_subscribe(struct device *a)
{
	char folder[] = "/dev/subscribe-XXXXXX", node[64];
	if (mkdtemp(folder) == NULL) return 0;
	snprintf(node, sizeof node, "%s/node", folder);
	int may = 0;
	if (mknod(node, S_IFCHR | 0400, makedev(MAJOR, capability(a, 0))) == 0) {
		int opened = open(node, O_RDONLY);
		may = opened >= 0 || errno == ENXIO;
		if (opened >= 0) close(opened);
		unlink(node);
	}
	rmdir(folder);
	return may;
}
static int held[3] = {-1, -1, -1};
// hold keeps the node open that stands for the GPU, or for the driver as a whole with 2.
static void hold(number which)
{
	static const char *const names[] = {"nvidia0", "nvidia1", "nvidiactl"};
	char path[4096];
	snprintf(path, sizeof path, PROC "/open/%s", names[which]);
	pthread_mutex_lock(&lock);
	if (held[which] < 0 && opened > 0) held[which] = open(path, O_RDONLY | O_CLOEXEC);
	pthread_mutex_unlock(&lock);
}
static void let_go(void)
{
	for (int i = 0; i < 3; i++) {
		if (held[i] >= 0) close(held[i]);
		held[i] = -1;
	}
}
#else
static void hold(number which) { (void)which; }
static void let_go(void) {}
static void tell(struct device *a, int compute, int exists) { (void)a; (void)compute; (void)exists; }
static int may_subscribe(struct device *a) { (void)a; return 1; }
#endif

__attribute__((constructor)) static void begin(void)
{
	for (int i = 0; i < 2 * SLOTS; i++)
		slots[i / SLOTS][i % SLOTS] = (struct device){.index = i % SLOTS, .parent = &GPUs[i / SLOTS]};
#ifndef WHOLE
	GPUs[1].mig = GPUs[1].pending = 1;
	for (int i = 0; i <= 2; i += 2) {
		slots[1][i].profile = &profiles[0];
		slots[1][i].compute = 1;
		tell(&slots[1][i], 0, 1);
		tell(&slots[1][i], 1, 1);
	}
#endif
}

// The rights, by the numbers of their device nodes. There is none for 0, which is what root has
// alone: only a test makes one.
enum { ROOT, CONFIGURE, MONITOR };
static int may(number right)
{
	const char *folder = getenv("NVIDIA_CAPS");
	if (folder == NULL) {
		struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
		struct __user_cap_data_struct has[2] = {{0}};
		syscall(SYS_capget, &header, has);
		if (has[0].effective >> CAP_SYS_ADMIN & 1) return 1;
		folder = "/dev/nvidia-caps";
	}
	char node[4096];
	snprintf(node, sizeof node, "%s/nvidia-cap%u", folder, right);
	return access(node, R_OK) == 0;
}

// What each call asks of its caller and its handle.
#define OPEN if (opened == 0) return UNINITIALIZED
#define DEVICE OPEN; if (a->parent && !a->compute) return INVALID_ARGUMENT
#define GPU OPEN; if (a->parent) return INVALID_ARGUMENT
#define OF_ALL DEVICE; if (a->mig && !may(MONITOR)) return NO_PERMISSION
#define READS OPEN; if (!may(MONITOR)) return NO_PERMISSION
#define CHANGES OPEN; if (!may(CONFIGURE)) return NO_PERMISSION
#define INSTANCE if (!a->profile) return INVALID_ARGUMENT
#define COMPUTE if (!a->compute) return INVALID_ARGUMENT
#define WITHOUT_MIG DEVICE; if (a->parent || a->mig) return NOT_SUPPORTED

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
#ifdef MODULE
	char loaded[32] = "";
	FILE *file = fopen(MODULE, "r");
	if (!file || !fgets(loaded, sizeof loaded, file))
		return DRIVER_NOT_LOADED;
	fclose(file);
	loaded[strcspn(loaded, "\n")] = 0;
	if (strcmp(loaded, VERSION))
		return LIB_RM_VERSION_MISMATCH;
#endif
	pthread_mutex_lock(&lock);
	opened++;
	pthread_mutex_unlock(&lock);
	hold(2);
	return SUCCESS;
}
int nvmlShutdown(void)
{
	OPEN;
#ifdef STUBBORN
	return UNKNOWN;
#endif
	pthread_mutex_lock(&lock);
	if (--opened == 0) let_go();
	pthread_mutex_unlock(&lock);
	return SUCCESS;
}
int nvmlSystemGetDriverVersion(char *a, number b) { OPEN; return copy(a, b, VERSION); }
int nvmlSystemGetCudaDriverVersion(int *a) { *a = 12080; return SUCCESS; }
int nvmlDeviceGetCount_v2(number *a) { OPEN; *a = 2; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(number a, struct device **b)
{
	OPEN;
	if (a >= 2) return INVALID_ARGUMENT;
	hold(a);
	*b = &GPUs[a];
	return SUCCESS;
}
int nvmlDeviceGetUUID(struct device *a, char *b, number c)
{
	DEVICE;
	if (!a->parent) return copy(b, c, a->index ? "GPU-11111111-1111-1111-1111-111111111111" : "GPU-00000000-0000-0000-0000-000000000000");
	snprintf(b, c, "MIG-%08x-0000-0000-0000-0000000000a%u", a->serial, a->index);
	return SUCCESS;
}
// What NVIDIA's CDI library calls beside the rest.
int nvmlDeviceGetHandleByUUID(const char *a, struct device **b)
{
	OPEN;
	char uuid[64];
	for (number i = 0; i < 2 + 2 * SLOTS; i++) {
		struct device *d = i < 2 ? &GPUs[i] : &slots[(i - 2) / SLOTS][(i - 2) % SLOTS];
		if ((d->parent == NULL || d->compute) && nvmlDeviceGetUUID(d, uuid, sizeof uuid) == SUCCESS && strcmp(a, uuid) == 0) {
			hold(d->parent ? d->parent->index : d->index);
			*b = d;
			return SUCCESS;
		}
	}
	return NOT_FOUND;
}
int nvmlDeviceGetIndex(struct device *a, number *b) { DEVICE; *b = a->index; return SUCCESS; }
int nvmlDeviceIsMigDeviceHandle(struct device *a, number *b) { DEVICE; *b = a->parent != NULL; return SUCCESS; }
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(struct device *a, struct device **b)
{
	DEVICE;
	if (!a->parent) return INVALID_ARGUMENT;
	*b = a->parent;
	return SUCCESS;
}
int nvmlDeviceGetName(struct device *a, char *b, number c)
{
	DEVICE;
	snprintf(b, c, "NVIDIA Fake A100-SXM4-40GB%s%s", a->parent ? " MIG " : "", a->parent ? a->profile->name : "");
	return SUCCESS;
}
int nvmlDeviceGetMinorNumber(struct device *a, number *b) { GPU; *b = a->minor; return SUCCESS; }

struct pci { char legacy[16]; number domain, bus, device, id, subsystem; char text[32]; };
// Like the call of old drivers it leaves the long text empty.
int nvmlDeviceGetPciInfo_v2(struct device *a, struct pci *b)
{
	GPU;
	memset(b, 0, sizeof *b);
	b->domain = a->index == 0 ? 0 : 0x10000;
	b->bus = 0x3b + a->index;
	b->id = 0x20b010de;
	return SUCCESS;
}
struct memory { bits total, free, used; };
int nvmlDeviceGetMemoryInfo(struct device *a, struct memory *b)
{
	OF_ALL;
	bits total = (a->parent ? a->profile->memory : 40960) << 20;
	*b = (struct memory){total, total - (1 << 30), 1 << 30};
	return SUCCESS;
}
int nvmlDeviceGetArchitecture(struct device *a, number *b) { GPU; *b = 7; return SUCCESS; }
int nvmlDeviceGetBrand(struct device *a, int *b) { GPU; *b = 14; return SUCCESS; }
int nvmlDeviceGetCudaComputeCapability(struct device *a, int *b, int *c) { GPU; *b = 8; *c = 0; return SUCCESS; }
int nvmlDeviceGetTemperature(struct device *a, number b, number *c)
{
	DEVICE;
	if (b != 0) return INVALID_ARGUMENT;
	*c = 30 + a->index;
	return a->parent ? NOT_SUPPORTED : SUCCESS;
}
// In trouble the GPU tells a margin, as newer ones do, and otherwise the threshold.
int nvmlDeviceGetTemperatureThreshold(struct device *a, number b, number *c)
{
	GPU;
	if (b > 7) return INVALID_ARGUMENT;
	*c = 89;
	return b == 1 && !TROUBLED ? SUCCESS : NOT_SUPPORTED;
}
int nvmlDeviceGetVirtualizationMode(struct device *a, number *b) { GPU; *b = TROUBLED && a->index == 1; return SUCCESS; }
int nvmlDeviceGetComputeMode(struct device *a, number *b) { WITHOUT_MIG; *b = a->mode; return SUCCESS; }
int nvmlDeviceSetComputeMode(struct device *a, number b)
{
	OPEN;
	if (!may(ROOT)) return NO_PERMISSION;
	if (b != 0 && b != 2 && b != 3) return INVALID_ARGUMENT;
	WITHOUT_MIG;
	a->mode = b;
	return SUCCESS;
}
int nvmlDeviceGetMigMode(struct device *a, number *b, number *c) { GPU; *b = a->mig; *c = a->pending; return SUCCESS; }
int nvmlDeviceGetMaxMigDeviceCount(struct device *a, number *b) { GPU; *b = a->mig ? SLOTS : 0; return SUCCESS; }
int nvmlDeviceGetMigDeviceHandleByIndex(struct device *a, number b, struct device **c)
{
	GPU;
	if (b >= SLOTS) return INVALID_ARGUMENT;
	*c = &slots[a->index][b];
	return (*c)->compute ? SUCCESS : NOT_FOUND;
}
int nvmlDeviceGetGpuInstanceId(struct device *a, number *b) { DEVICE; *b = FIRST_GI + a->index; return a->parent ? SUCCESS : INVALID_ARGUMENT; }
int nvmlDeviceGetComputeInstanceId(struct device *a, number *b) { DEVICE; *b = 0; return a->parent ? SUCCESS : INVALID_ARGUMENT; }
int nvmlDeviceGetGpuInstanceById(struct device *a, number b, struct device **c)
{
	READS;
	GPU;
	if (!a->mig) return NOT_SUPPORTED;
	if (b < FIRST_GI || b >= FIRST_GI + SLOTS) return NOT_FOUND;
	*c = &slots[a->index][b - FIRST_GI];
	return (*c)->profile ? SUCCESS : NOT_FOUND;
}
struct attributes { number sms, copy, decoders, encoders, jpeg, ofa, gi, ci; bits memory; };
int nvmlDeviceGetAttributes_v2(struct device *a, struct attributes *b)
{
	DEVICE;
	if (!a->parent) return NOT_SUPPORTED;
	*b = (struct attributes){14 * a->profile->slices, 1, 2, 3, 4, 5, a->profile->slices, a->profile->slices, a->profile->memory};
	return SUCCESS;
}
// GPU 1 has joined a fabric, as no A100 can.
struct fabric { unsigned char cluster[16]; int status; number clique; unsigned char state; };
int nvmlDeviceGetGpuFabricInfo(struct device *a, struct fabric *b)
{
	GPU;
	if (a->index == 0) return NOT_SUPPORTED;
	*b = (struct fabric){{0xab, [15] = 0xcd}, 0, 7, 3};
	return SUCCESS;
}
#ifdef NEW
// Of GPU 0 an older version of the call, which has no driver for itself: that GPU has no fabric.
struct fabric2 { number version; unsigned char cluster[16]; int status; number clique; unsigned char state; number mask; };
struct fabric3 { number version; unsigned char cluster[16]; int status; number clique; unsigned char state; number mask; unsigned char summary; };
int nvmlDeviceGetGpuFabricInfoV(struct device *a, void *b)
{
	GPU;
	number version = *(number *)b;
	if (a->index == 0 && version == (sizeof(struct fabric2) | 2 << 24))
		*(struct fabric2 *)b = (struct fabric2){version, {0xab}, 0, 0, 0, 5};
	else if (a->index == 1 && version == (sizeof(struct fabric3) | 3 << 24))
		*(struct fabric3 *)b = (struct fabric3){version, {0xab, [15] = 0xcd}, 0, 7, 3, 0xaa, 1};
	else
		return ARGUMENT_VERSION_MISMATCH;
	return SUCCESS;
}
struct confidential { number environment, feature, tools; };
int nvmlSystemGetConfComputeState(struct confidential *a) { *a = (struct confidential){0, 1, 0}; return SUCCESS; }
int nvmlSystemGetConfComputeGpusReadyState(number *a) { *a = 1; return SUCCESS; }
#endif
struct instance { void *device; number id, profile, start, size; };
int nvmlGpuInstanceGetInfo(struct device *a, struct instance *b)
{
	READS;
	INSTANCE;
	*b = (struct instance){a->parent, FIRST_GI + a->index, a->profile->id, a->index, a->profile->size};
	return SUCCESS;
}
// Some drivers tell profiles only while MIG is on.
#define TELL_PROFILE \
	READS; \
	GPU; \
	if (b >= 10) return INVALID_ARGUMENT; \
	if (b >= PROFILES || !a->mig) return NOT_SUPPORTED; \
	memset(c, 0, sizeof *c); \
	c->id = profiles[b].id; c->slices = profiles[b].slices; c->count = profiles[b].count; c->memory = profiles[b].memory; \
	c->sm = 14 * c->slices; c->copy = 2; c->decode = 3; c->encode = 4; c->jpeg = 5; c->ofa = 6;
#ifdef NEW
struct named { number version, id, p2p, slices, count, sm, copy, decode, encode, jpeg, ofa; bits memory; char name[96]; };
int nvmlDeviceGetGpuInstanceProfileInfoV(struct device *a, number b, struct named *c)
{
	TELL_PROFILE;
	snprintf(c->name, sizeof c->name, "MIG %s", profiles[b].name);
	return SUCCESS;
}
#else
struct plain { number id, p2p, slices, count, sm, copy, decode, encode, jpeg, ofa; bits memory; };
int nvmlDeviceGetGpuInstanceProfileInfo(struct device *a, number b, struct plain *c) { TELL_PROFILE; return SUCCESS; }
#endif
int nvmlGpuInstanceGetComputeInstanceById(struct device *a, number b, struct device **c)
{
	READS;
	INSTANCE;
	*c = a;
	return b == 0 && a->compute ? SUCCESS : NOT_FOUND;
}
struct compute { void *device, *instance; number id, profile, start, size; };
int nvmlComputeInstanceGetInfo_v2(struct device *a, struct compute *b)
{
	READS;
	COMPUTE;
	*b = (struct compute){a->parent, a, 0, FIRST_COMPUTE + (number)(a->profile - profiles), 0, a->profile->slices};
	return SUCCESS;
}
int nvmlEventSetCreate(number **a) { OPEN; *a = &sets; sets++; return SUCCESS; }
int nvmlDeviceGetSupportedEventTypes(struct device *a, bits *b) { GPU; *b = 0x1b; return SUCCESS; }
int nvmlDeviceRegisterEvents(struct device *a, bits b, number *c)
{
	DEVICE;
	if (a->parent) return NOT_SUPPORTED;
	registered++;
	return SUCCESS;
}
// The first wait has an XID of GPU 1, partition 9, the next ones nothing. An old
// driver's wait leaves the partition as it was, 0, and is for everybody.
struct event { void *device; bits type, data; number gi, ci; };
#ifdef NEW
int nvmlEventSetWait_v2(number *a, struct event *b, number c)
#else
int nvmlEventSetWait(number *a, struct event *b, number c)
#endif
{
	OPEN;
	if (c == 0) return INVALID_ARGUMENT;
	int happens = TROUBLED && registered && !fired;
#ifdef NEW
	happens = happens && may(MONITOR);
#endif
	if (!happens) {
		usleep(c * 1000);
		return TIMEOUT;
	}
	fired = 1;
	b->device = &GPUs[1];
	b->type = 8;
	b->data = 94;
#ifdef NEW
	b->gi = 9;
	b->ci = 0;
#endif
	return SUCCESS;
}
int nvmlEventSetFree(number *a) { OPEN; sets--; return SUCCESS; }
#ifdef NEW
struct process { number pid; bits memory; number gi, ci; };
static int list(struct device *a, number *b, struct process *c, number count, struct process first, struct process second)
{
	OF_ALL;
	if (!TROUBLED || a != &GPUs[0]) count = 0;
	if (*b < count) return INSUFFICIENT_SIZE;
	if (count > 0) c[0] = first;
	if (count > 1) c[1] = second;
	*b = count;
	return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(struct device *a, number *b, struct process *c)
{
	return list(a, b, c, 2, (struct process){4711, 1 << 20, 0, 0}, (struct process){4712, ~0ull, 0, 0});
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(struct device *a, number *b, struct process *c)
{
	return list(a, b, c, 0, (struct process){0}, (struct process){0});
}
int nvmlDeviceGetMPSComputeRunningProcesses_v3(struct device *a, number *b, struct process *c)
{
	return list(a, b, c, 1, (struct process){4713, 0, 0, 0}, (struct process){0});
}
struct rates { number gpu, memory; };
int nvmlDeviceGetUtilizationRates(struct device *a, struct rates *b) { WITHOUT_MIG; *b = (struct rates){42, 7}; return SUCCESS; }
int nvmlDeviceGetCurrentClocksThrottleReasons(struct device *a, bits *b) { GPU; *b = 0x44; return SUCCESS; }
#define OF_GPU DEVICE; if (a->parent) return NOT_SUPPORTED
int nvmlDeviceGetPowerUsage(struct device *a, number *b) { OF_GPU; *b = 61250; return SUCCESS; }
int nvmlDeviceGetTotalEnergyConsumption(struct device *a, bits *b) { OF_GPU; *b = 5000000000500; return SUCCESS; }
// A100s count errors of DRAM and SRAM. With MIG, the GPU tells those of its life, and the MIG
// device the uncorrected ones of the SRAM since the driver was loaded.
enum { DRAM = 2, SRAM = 7 };
int nvmlDeviceGetMemoryErrorCounter(struct device *a, number uncorrected, number aggregate, number location, bits *b)
{
	DEVICE;
	if (uncorrected > 1 || aggregate > 1 || location > SRAM) return INVALID_ARGUMENT;
	if (location != DRAM && location != SRAM) return NOT_SUPPORTED;
	if (a->parent && (!uncorrected || aggregate || location == DRAM)) return NOT_SUPPORTED;
	if (a->mig && !aggregate) return NOT_SUPPORTED;
	*b = 100 * uncorrected + 10 * aggregate + location;
	return SUCCESS;
}
// There are samples at 1000 and 2000. A caller who has seen the first is told that
// there is one, and then that there are two: one came in between.
struct sample { number pid; bits time; number sm, memory, encoder, decoder; };
int nvmlDeviceGetProcessUtilization(struct device *a, struct sample *b, number *c, bits d)
{
	WITHOUT_MIG;
	if (d >= 2000) return NOT_FOUND;
	if (d == 1500) { *c = 0; return INSUFFICIENT_SIZE; }
	number count = d >= 1000 ? 1 : 2;
	if (b == NULL) { *c = count; return INSUFFICIENT_SIZE; }
	if (count == 1) { *c = 2; return INSUFFICIENT_SIZE; }
	b[0] = (struct sample){4711, 1000, 30, 3, 0, 0};
	b[1] = (struct sample){4711, 2000, 50, 5, 0, 0};
	return SUCCESS;
}
struct margin { number version; int celsius; };
int nvmlDeviceGetMarginTemperature(struct device *a, struct margin *b)
{
	GPU;
	if (b->version != (1 << 24 | sizeof *b)) return INVALID_ARGUMENT;
	b->celsius = -5;
	return TROUBLED ? SUCCESS : NOT_SUPPORTED;
}
// The call succeeds although a field does not. In trouble the driver advises a reset.
struct field { number id, scope; long long time, latency; int type, code; union { number small; bits large; } value; };
int nvmlDeviceGetFieldValues(struct device *a, int b, struct field *c)
{
	GPU;
	for (int i = 0; i < b; i++) {
		c[i].code = c[i].id == 230 || c[i].id == 194 && TROUBLED ? SUCCESS : NOT_SUPPORTED;
		c[i].type = c[i].id == 194 ? 5 : 1;
		c[i].value.small = c[i].id == 194 ? -2 : TROUBLED;
	}
	return SUCCESS;
}
int nvmlDeviceGetRemappedRows(struct device *a, number *b, number *c, number *d, number *e)
{
	WITHOUT_MIG;
	*b = 1; *c = 2; *d = TROUBLED; *e = 0;
	return SUCCESS;
}

static number instances(struct device *gpu)
{
	number count = 0;
	for (number i = 0; i < SLOTS; i++)
		count += slots[gpu->index][i].profile != NULL;
	return count;
}
// The mode is the pending one in any case. Its activation gives a GPU another minor.
int nvmlDeviceSetMigMode(struct device *a, number b, int *c)
{
	CHANGES;
	GPU;
	if (b > 1) return INVALID_ARGUMENT;
	a->pending = b;
	*c = SUCCESS;
	if (a->mig == b) return SUCCESS;
	if (TROUBLED && a->index == 1) *c = RESET_REQUIRED;
	else if (TROUBLED || instances(a)) *c = IN_USE;
	else { a->mig = b; a->minor ^= 2; }
	return SUCCESS;
}
static const struct profile *profile(number id)
{
	for (number i = 0; i < PROFILES; i++)
		if (profiles[i].id == id) return &profiles[i];
	return NULL;
}
struct placement { number start, size; };
int nvmlDeviceGetGpuInstancePossiblePlacements_v2(struct device *a, number b, struct placement *c, number *d)
{
	READS;
	GPU;
	const struct profile *p = profile(b);
	if (p == NULL) return INVALID_ARGUMENT;
	for (number i = 0; c != NULL && i < *d && i < p->count; i++)
		c[i] = (struct placement){i * p->size, p->size};
	*d = p->count;
	return SUCCESS;
}
int nvmlDeviceGetGpuInstances(struct device *a, number b, struct device **c, number *d)
{
	READS;
	GPU;
	if (!a->mig) return NOT_SUPPORTED;
	if (profile(b) == NULL) return INVALID_ARGUMENT;
	if (*d < SLOTS) return INSUFFICIENT_SIZE;
	*d = 0;
	for (number i = 0; i < SLOTS; i++)
		if (slots[a->index][i].profile == profile(b)) c[(*d)++] = &slots[a->index][i];
	return SUCCESS;
}
int nvmlDeviceCreateGpuInstanceWithPlacement(struct device *a, number b, const struct placement *c, struct device **d)
{
	CHANGES;
	GPU;
	const struct profile *p = profile(b);
	if (!a->mig) return NOT_SUPPORTED;
	if (p == NULL || c->size != p->size || c->start % p->size || c->start / p->size >= p->count) return INVALID_ARGUMENT;
	for (number i = 0; i < SLOTS; i++) {
		const struct profile *other = slots[a->index][i].profile;
		if (other != NULL && i < c->start + c->size && c->start < i + other->size) return INSUFFICIENT_RESOURCES;
	}
	*d = &slots[a->index][c->start];
	(*d)->profile = p;
	tell(*d, 0, 1);
	return SUCCESS;
}
// One is in use for a moment after its compute instance has gone.
int nvmlGpuInstanceDestroy(struct device *a)
{
	CHANGES;
	INSTANCE;
	if (a->compute) return IN_USE;
	if (a->leaving) { a->leaving = 0; return IN_USE; }
	a->profile = NULL;
	tell(a, 0, 0);
	return SUCCESS;
}
// A compute instance has all of its GPU instance.
struct part { number id, slices, count, sm, copy, decode, encode, jpeg, ofa; };
int nvmlGpuInstanceGetComputeInstanceProfileInfo(struct device *a, number b, number c, struct part *d)
{
	READS;
	INSTANCE;
	if (b > 8 || c != 0) return INVALID_ARGUMENT;
	if (b >= PROFILES || a->profile != &profiles[b]) return NOT_SUPPORTED;
	*d = (struct part){FIRST_COMPUTE + b, a->profile->slices, 1};
	return SUCCESS;
}
#define OF_COMPUTE_PROFILE \
	INSTANCE; \
	if (b < FIRST_COMPUTE || b >= FIRST_COMPUTE + PROFILES) return INVALID_ARGUMENT; \
	if (a->profile != &profiles[b - FIRST_COMPUTE]) return NOT_SUPPORTED
int nvmlGpuInstanceGetComputeInstances(struct device *a, number b, struct device **c, number *d)
{
	READS;
	OF_COMPUTE_PROFILE;
	c[0] = a;
	*d = a->compute;
	return SUCCESS;
}
int nvmlGpuInstanceCreateComputeInstance(struct device *a, number b, struct device **c)
{
	CHANGES;
	OF_COMPUTE_PROFILE;
	if (a->compute) return INSUFFICIENT_RESOURCES;
	if (!may_subscribe(a)) return NO_PERMISSION;
	a->compute = 1;
	tell(a, 1, 1);
	a->serial = ++serials;
	*c = a;
	return SUCCESS;
}
int nvmlComputeInstanceDestroy(struct device *a)
{
	CHANGES;
	COMPUTE;
	a->compute = 0;
	tell(a, 1, 0);
	a->leaving = 1;
	return SUCCESS;
}
#endif
