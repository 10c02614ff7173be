/* A stand-in for libnvidia-ml.so.1 that answers from a text file, written from the public NVML API.
 *
 * NVML_STUB_FILE names the file (`key=value` lines, read again whenever it changes), and
 * NVML_STUB_CALLS a file to which every call appends the line `<function> <card>[.<mig index>]`.
 *
 * A key is `<scope>.<function>[.<argument>]`, where the scope is a card's index, `<card>.mig.<i>`
 * for a MIG device, or nothing for a call about the whole system.  A card without the key does not
 * support the call; the value `!15` makes it return error 15.  Faults, for a scope or for all:
 *
 *   <scope>.error.<function>=15   <scope>.error.*=15      the call returns this code
 *   <scope>.hang.<function>=5     <scope>.hang.*=5        it returns only after so many seconds,
 *                                                         or once the line has left the file
 *   <scope>.crash.<function>=1                            it ends the process with SIGSEGV
 *   <scope>.stale=N               every call says that the card is lost, until the library was
 *                                 initialised more than N times
 *   print=1                                               every call prints on standard output
 *   forget=N                                              a new N: the library is not initialised
 *   leak=N                        bytes that nvmlDeviceGetPersistenceMode loses at each call
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long ull;

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, TIMEOUT = 10, GPU_IS_LOST = 15, NO_DATA = 21, VERSION_MISMATCH = 25,
};

#define MAX_CARDS 64
#define MAX_MIG 16
#define BUCKETS 8192

typedef struct { int card, mig; } Device; /* mig -1: the card itself */

static Device cards[MAX_CARDS], slices[MAX_CARDS][MAX_MIG], instances[MAX_CARDS][256];

/* ------------------------------------------------------------------ the file */

typedef struct Entry { struct Entry *next; char *key, *value; } Entry;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Entry *table[BUCKETS];
static struct stat loaded;
static int initialised, starts;
static long forgotten;

static unsigned hash(const char *text) {
    unsigned sum = 2166136261u;
    for (; *text; text++) sum = (sum ^ (unsigned char)*text) * 16777619u;
    return sum % BUCKETS;
}

static const char *find(const char *key) {
    for (Entry *entry = table[hash(key)]; entry; entry = entry->next)
        if (!strcmp(entry->key, key)) return entry->value;
    return NULL;
}

static void load(void) {
    const char *path = getenv("NVML_STUB_FILE");
    struct stat now;
    if (!path || stat(path, &now)) return;
    if (now.st_ino == loaded.st_ino && now.st_mtim.tv_sec == loaded.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == loaded.st_mtim.tv_nsec)
        return;
    FILE *file = fopen(path, "r");
    if (!file) return;
    loaded = now;
    for (int i = 0; i < BUCKETS; i++) {
        for (Entry *entry = table[i], *next; entry; entry = next) {
            next = entry->next;
            free(entry->key);
            free(entry->value);
            free(entry);
        }
        table[i] = NULL;
    }
    char *line = NULL;
    size_t size = 0;
    while (getline(&line, &size, file) > 0) {
        line[strcspn(line, "\n")] = 0;
        char *equals = strchr(line, '=');
        if (!equals) continue;
        *equals = 0;
        Entry *entry = malloc(sizeof *entry);
        entry->key = strdup(line);
        entry->value = strdup(equals + 1);
        entry->next = table[hash(line)];
        table[hash(line)] = entry;
    }
    free(line);
    fclose(file);
    const char *forget = find("forget");
    if (forget && atol(forget) != forgotten) {
        forgotten = atol(forget);
        initialised = 0;
    }
}

/* The value of a key as a copy that the caller frees, or NULL. */
static char *get(const char *format, ...) {
    char key[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(key, sizeof key, format, arguments);
    va_end(arguments);
    pthread_mutex_lock(&lock);
    load();
    const char *value = find(key);
    char *copy = value ? strdup(value) : NULL;
    pthread_mutex_unlock(&lock);
    return copy;
}

static double get_number(double missing, const char *key) {
    char *value = get("%s", key);
    double number = value ? atof(value) : missing;
    free(value);
    return number;
}

/* `text` holds `!<code>`: that code; nothing: NOT_SUPPORTED; else SUCCESS. */
static int refusal(const char *text) {
    if (!text) return NOT_SUPPORTED;
    return text[0] == '!' ? atoi(text + 1) : SUCCESS;
}

/* ------------------------------------------------------------------ every call */

static void scope_of(const Device *device, char *scope, size_t size) {
    if (!device) scope[0] = 0;
    else if (device->mig < 0) snprintf(scope, size, "%d.", device->card);
    else snprintf(scope, size, "%d.mig.%d.", device->card, device->mig);
}

static void note(const char *call, const Device *device) {
    const char *path = getenv("NVML_STUB_CALLS");
    if (!path) return;
    char line[160];
    int size;
    if (!device) size = snprintf(line, sizeof line, "%s\n", call);
    else if (device->mig < 0) size = snprintf(line, sizeof line, "%s %d\n", call, device->card);
    else size = snprintf(line, sizeof line, "%s %d.%d\n", call, device->card, device->mig);
    int file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (file < 0) return;
    if (write(file, line, size) < 0) perror("NVML_STUB_CALLS");
    close(file);
}

static char *fault(const char *scope, const char *kind, const char *call) {
    char *value = get("%s%s.%s", scope, kind, call);
    return value ? value : get("%s%s.*", scope, kind);
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

static ull now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (ull)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

static int faults(const char *call, const Device *device) {
    char scope[64];
    scope_of(device, scope, sizeof scope);
    char *crash = get("%scrash.%s", scope, call);
    if (crash) raise(SIGSEGV);
    double began = seconds();
    for (;;) {
        char *hang = fault(scope, "hang", call);
        double span = hang ? atof(hang) : 0;
        free(hang);
        if (seconds() - began >= span) break;
        usleep(20000);
    }
    char *stale = get("%sstale", scope);
    int lost = stale && starts <= atoi(stale);
    free(stale);
    if (lost) return GPU_IS_LOST;
    char *error = fault(scope, "error", call);
    int code = error ? atoi(error) : SUCCESS;
    free(error);
    return code;
}

static int enter(const char *call, const Device *device) {
    note(call, device);
    char *print = get("print");
    if (print) {
        printf("NVML stub: %s\n", call);
        fflush(stdout);
        free(print);
    }
    int ready;
    pthread_mutex_lock(&lock);
    load();
    ready = initialised;
    pthread_mutex_unlock(&lock);
    if (!ready) return UNINITIALIZED;
    int code = faults(call, NULL);
    if (code || !device) return code;
    return faults(call, device);
}

#define ENTER(device)                              \
    do {                                           \
        int entered_ = enter(__func__, (device));  \
        if (entered_) return entered_;             \
    } while (0)

/* Look up `<scope><function><suffix>`; return from the caller when it refuses. */
#define VALUE(text, device, suffix)                                     \
    char scope_[64];                                                    \
    scope_of((device), scope_, sizeof scope_);                          \
    char *text = get("%s%s%s", scope_, __func__, (suffix));             \
    do {                                                                \
        int refused_ = refusal(text);                                   \
        if (refused_) { free(text); return refused_; }                  \
    } while (0)

static int copy_text(const char *text, char *out, unsigned size) {
    /* `\xNN` is one byte, so that a test can hand out what is no UTF-8. */
    unsigned used = 0;
    while (*text && used + 1 < size) {
        unsigned byte;
        if (text[0] == '\\' && text[1] == 'x' && sscanf(text + 2, "%2x", &byte) == 1) {
            out[used++] = (char)byte;
            text += 4;
        } else
            out[used++] = *text++;
    }
    out[used] = 0;
    return SUCCESS;
}

static ull number_of(const char *text) {
    return strchr(text, '-') == text ? (ull)strtoll(text, NULL, 0) : strtoull(text, NULL, 0);
}

/* `a,b,c` into numbers; how many there were. */
static int numbers(const char *text, ull *out, int most) {
    int count = 0;
    while (*text && count < most) {
        out[count++] = number_of(text);
        text += strcspn(text, ",:");
        if (*text) text++;
    }
    return count;
}

#define U32(function)                                                   \
    int function(Device *device, unsigned *out) {                       \
        ENTER(device);                                                  \
        VALUE(text, device, "");                                        \
        *out = (unsigned)number_of(text);                               \
        free(text);                                                     \
        return SUCCESS;                                                 \
    }

#define U64(function)                                                   \
    int function(Device *device, ull *out) {                            \
        ENTER(device);                                                  \
        VALUE(text, device, "");                                        \
        *out = number_of(text);                                         \
        free(text);                                                     \
        return SUCCESS;                                                 \
    }

#define PAIR(function)                                                  \
    int function(Device *device, unsigned *first, unsigned *second) {   \
        ENTER(device);                                                  \
        VALUE(text, device, "");                                        \
        ull both[2] = {0, 0};                                           \
        numbers(text, both, 2);                                         \
        *first = (unsigned)both[0];                                     \
        *second = (unsigned)both[1];                                    \
        free(text);                                                     \
        return SUCCESS;                                                 \
    }

#define BY_KIND(function)                                               \
    int function(Device *device, unsigned kind, unsigned *out) {        \
        ENTER(device);                                                  \
        char suffix[16];                                                \
        snprintf(suffix, sizeof suffix, ".%u", kind);                   \
        VALUE(text, device, suffix);                                    \
        *out = (unsigned)number_of(text);                               \
        free(text);                                                     \
        return SUCCESS;                                                 \
    }

#define TEXT(function)                                                  \
    int function(Device *device, char *out, unsigned size) {            \
        ENTER(device);                                                  \
        VALUE(text, device, "");                                        \
        copy_text(text, out, size);                                     \
        free(text);                                                     \
        return SUCCESS;                                                 \
    }

/* ------------------------------------------------------------------ the system */

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    note(__func__, NULL);
    int code = faults(__func__, NULL);
    if (code) return code;
    pthread_mutex_lock(&lock);
    load();
    initialised = 1;
    starts++;
    for (int i = 0; i < MAX_CARDS; i++) {
        cards[i] = (Device){i, -1};
        for (int j = 0; j < MAX_MIG; j++) slices[i][j] = (Device){i, j};
        for (int j = 0; j < 256; j++) instances[i][j] = (Device){i, j};
    }
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    ENTER(NULL);
    pthread_mutex_lock(&lock);
    initialised = 0;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    static __thread char text[40];
    snprintf(text, sizeof text, "stub error %d", code);
    return text;
}

static int system_text(const char *call, char *out, unsigned size) {
    int code = enter(call, NULL);
    if (code) return code;
    char *text = get("%s", call);
    code = refusal(text);
    if (!code) copy_text(text, out, size);
    free(text);
    return code;
}

int nvmlSystemGetDriverVersion(char *out, unsigned size) { return system_text(__func__, out, size); }
int nvmlSystemGetNVMLVersion(char *out, unsigned size) { return system_text(__func__, out, size); }

static int cuda_version(const char *call, int *out) {
    int code = enter(call, NULL);
    if (code) return code;
    char *text = get("nvmlSystemGetCudaDriverVersion");
    code = refusal(text);
    if (!code) *out = atoi(text);
    free(text);
    return code;
}

int nvmlSystemGetCudaDriverVersion(int *out) { return cuda_version(__func__, out); }
#ifndef OLD_DRIVER
int nvmlSystemGetCudaDriverVersion_v2(int *out) { return cuda_version(__func__, out); }
#endif

int nvmlDeviceGetCount_v2(unsigned *out) {
    ENTER(NULL);
    *out = (unsigned)get_number(0, "count");
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) {
    if (index >= MAX_CARDS || index >= (unsigned)get_number(0, "count")) {
        ENTER(NULL);
        return INVALID_ARGUMENT;
    }
    ENTER(&cards[index]);
    *out = &cards[index];
    return SUCCESS;
}

/* ------------------------------------------------------------------ what a card is */

TEXT(nvmlDeviceGetName)
TEXT(nvmlDeviceGetUUID)
TEXT(nvmlDeviceGetSerial)
TEXT(nvmlDeviceGetVbiosVersion)
U32(nvmlDeviceGetMinorNumber)
U32(nvmlDeviceGetBrand)
U32(nvmlDeviceGetArchitecture)
U64(nvmlDeviceGetVirtualizationMode)

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
} PciInfo;

static int pci_info(const char *call, Device *device, PciInfo *out) {
    int code = enter(call, device);
    if (code) return code;
    char *text = get("%d.nvmlDeviceGetPciInfo", device->card);
    code = refusal(text);
    if (!code) {
        memset(out, 0, sizeof *out);
        copy_text(text, out->bus_id, sizeof out->bus_id);
        copy_text(strlen(text) > 4 ? text + 4 : text, out->legacy, sizeof out->legacy);
    }
    free(text);
    return code;
}

int nvmlDeviceGetPciInfo_v2(Device *device, PciInfo *out) { return pci_info(__func__, device, out); }
#ifndef OLD_DRIVER
int nvmlDeviceGetPciInfo_v3(Device *device, PciInfo *out) { return pci_info(__func__, device, out); }
#endif

int nvmlDeviceGetMemoryAffinity(Device *device, unsigned size, unsigned long *out, unsigned scope) {
    (void)scope;
    ENTER(device);
    VALUE(text, device, "");
    memset(out, 0, size * sizeof *out);
    if (size) out[0] = number_of(text);
    free(text);
    return SUCCESS;
}

/* ------------------------------------------------------------------ scalar readings */

U32(nvmlDeviceGetPowerUsage)
U32(nvmlDeviceGetEnforcedPowerLimit)
U32(nvmlDeviceGetPowerManagementDefaultLimit)
U32(nvmlDeviceGetPerformanceState)
U32(nvmlDeviceGetFanSpeed)
U32(nvmlDeviceGetComputeMode)
U32(nvmlDeviceGetCurrPcieLinkGeneration)
U32(nvmlDeviceGetCurrPcieLinkWidth)
U32(nvmlDeviceGetMaxPcieLinkGeneration)
U32(nvmlDeviceGetMaxPcieLinkWidth)
U32(nvmlDeviceGetMaxMigDeviceCount)
U32(nvmlDeviceGetGpuInstanceId)
U32(nvmlDeviceGetComputeInstanceId)
U64(nvmlDeviceGetCurrentClocksThrottleReasons)
PAIR(nvmlDeviceGetMigMode)
PAIR(nvmlDeviceGetEncoderUtilization)
PAIR(nvmlDeviceGetDecoderUtilization)
BY_KIND(nvmlDeviceGetClockInfo)
BY_KIND(nvmlDeviceGetMaxClockInfo)
BY_KIND(nvmlDeviceGetTemperature)
BY_KIND(nvmlDeviceGetTemperatureThreshold)

typedef struct { unsigned gpu, memory; } Rates;

int nvmlDeviceGetUtilizationRates(Device *device, Rates *out) {
    ENTER(device);
    VALUE(text, device, "");
    ull both[2] = {0, 0};
    numbers(text, both, 2);
    out->gpu = (unsigned)both[0];
    out->memory = (unsigned)both[1];
    free(text);
    return SUCCESS;
}

#ifndef OLD_DRIVER
PAIR(nvmlDeviceGetJpgUtilization)
PAIR(nvmlDeviceGetOfaUtilization)
U64(nvmlDeviceGetCurrentClocksEventReasons)

typedef struct { unsigned version, sensor; int temperature; } Temperature;

int nvmlDeviceGetTemperatureV(Device *device, Temperature *out) {
    ENTER(device);
    if (out->version != 0x100000C) return VERSION_MISMATCH;
    VALUE(text, device, "");
    out->temperature = (int)number_of(text);
    free(text);
    return SUCCESS;
}

typedef struct {
    unsigned version;
    unsigned char cluster[16];
    unsigned status, clique;
    unsigned char state;
    unsigned health;
} Fabric;

int nvmlDeviceGetGpuFabricInfoV(Device *device, Fabric *out) {
    ENTER(device);
    if (out->version != 0x02000024) return VERSION_MISMATCH;
    VALUE(text, device, ""); /* state,status,health mask */
    ull parts[3] = {0, 0, 0};
    numbers(text, parts, 3);
    out->state = (unsigned char)parts[0];
    out->status = (unsigned)parts[1];
    out->health = (unsigned)parts[2];
    free(text);
    return SUCCESS;
}
#endif

int nvmlDeviceGetPersistenceMode(Device *device, unsigned *out) {
    ENTER(device);
    size_t lost = (size_t)get_number(0, "leak");
    if (lost) memset(malloc(lost), 1, lost);
    VALUE(text, device, "");
    *out = (unsigned)number_of(text);
    free(text);
    return SUCCESS;
}

typedef struct {
    unsigned code, state;
    char info[128], product[128];
    unsigned enabled;
    struct { unsigned year; unsigned short month, day, hour, minute, second; unsigned char status; } expiry;
} Feature;
typedef struct { int supported; unsigned count; Feature features[3]; } Features;

int nvmlDeviceGetGridLicensableFeatures_v4(Device *device, Features *out) {
    ENTER(device);
    VALUE(text, device, ""); /* state of the one feature */
    memset(out, 0, sizeof *out);
    out->supported = 1;
    out->count = 1;
    out->features[0].code = 1;
    out->features[0].state = (unsigned)number_of(text);
    free(text);
    return SUCCESS;
}

/* ------------------------------------------------------------------ memory */

typedef struct { ull total, free, used; } Memory1;
typedef struct { unsigned version; ull total, reserved, free, used; } Memory2;

/* The key holds total,reserved,used,free as the second version counts them. */
static int memory(const char *call, Device *device, ull *parts) {
    int code = enter(call, device);
    if (code) return code;
    char scope[64];
    scope_of(device, scope, sizeof scope);
    char *text = get("%snvmlDeviceGetMemoryInfo", scope);
    code = refusal(text);
    memset(parts, 0, 4 * sizeof *parts);
    if (!code) numbers(text, parts, 4);
    free(text);
    return code;
}

int nvmlDeviceGetMemoryInfo(Device *device, Memory1 *out) {
    ull parts[4];
    int code = memory(__func__, device, parts);
    if (!code) *out = (Memory1){parts[0], parts[3], parts[1] + parts[2]};
    return code;
}

#ifndef OLD_DRIVER
int nvmlDeviceGetMemoryInfo_v2(Device *device, Memory2 *out) {
    ull parts[4];
    int code = memory(__func__, device, parts);
    if (code) return code;
    if (out->version != 0x02000028) return VERSION_MISMATCH;
    *out = (Memory2){out->version, parts[0], parts[1], parts[3], parts[2]};
    return SUCCESS;
}
#endif

int nvmlDeviceGetBAR1MemoryInfo(Device *device, Memory1 *out) {
    ENTER(device);
    VALUE(text, device, ""); /* total,used,free */
    ull parts[3] = {0, 0, 0};
    numbers(text, parts, 3);
    *out = (Memory1){parts[0], parts[2], parts[1]};
    free(text);
    return SUCCESS;
}

/* ------------------------------------------------------------------ field values */

typedef union { double d; unsigned ui; ull ull_; long long sll; int si; unsigned short us; } Value;
typedef struct {
    unsigned id, scope;
    long long timestamp, latency;
    unsigned type, code;
    Value value;
} Field;

/* A key `<card>.field.<id>[.<scope>]` holds `<type>:<number>`; error codes as everywhere. */
int nvmlDeviceGetFieldValues(Device *device, int count, Field *fields) {
    ENTER(device);
    for (int i = 0; i < count; i++) {
        Field *field = &fields[i];
        char *text = get("%d.field.%u.%u", device->card, field->id, field->scope);
        if (!text && !field->scope) text = get("%d.field.%u", device->card, field->id);
        field->code = refusal(text);
        field->timestamp = (long long)now_us();
        if (field->code) {
            /* As real drivers do: what stands in the union then is anything. */
            field->value.ull_ = 0xdeadbeefdeadbeefULL;
            free(text);
            continue;
        }
        field->type = (unsigned)atoi(text);
        char *number = strchr(text, ':') ? strchr(text, ':') + 1 : "0";
        switch (field->type) {
        case 0: field->value.d = atof(number); break;
        case 1: field->value.ui += (unsigned)number_of(number); break;
        case 5: field->value.si = (int)number_of(number); break;
        case 6: field->value.us += (unsigned short)number_of(number); break;
        default: field->value.ull_ += number_of(number); /* adds up in a buffer used again */
        }
        free(text);
    }
    return SUCCESS;
}

/* ------------------------------------------------------------------ sample buffers */

typedef struct { ull timestamp; Value value; } Sample;

static ull busy_until(ull at, ull period, ull on) {
    ull rest = at % period;
    return at / period * on + (rest < on ? rest : on);
}

/* `<ts>:<percent>,...`, or `wave:<period us>:<busy us>:<step us>`: the last 20 s of a square wave. */
int nvmlDeviceGetSamples(Device *device, unsigned kind, ull last, unsigned *type, unsigned *count,
                         Sample *out) {
    ENTER(device);
    char suffix[16];
    snprintf(suffix, sizeof suffix, ".%u", kind);
    VALUE(text, device, suffix);
    if (!out) {
        *count = 128;
        free(text);
        return SUCCESS;
    }
    *type = 1;
    unsigned used = 0, most = *count;
    if (!strncmp(text, "wave:", 5)) {
        ull wave[3];
        numbers(text + 5, wave, 3);
        ull end = now_us() / wave[2];
        for (ull tick = end - 120; tick <= end && used < most; tick++) {
            ull at = tick * wave[2];
            ull busy = busy_until(at, wave[0], wave[1]) - busy_until(at - wave[2], wave[0], wave[1]);
            if (at > last) out[used++] = (Sample){at, {.ull_ = (busy * 100 + wave[2] / 2) / wave[2]}};
        }
    } else
        for (char *at = text; *at && used < most;) {
            ull pair[2] = {0, 0};
            numbers(at, pair, 2);
            if (pair[0] > last) out[used++] = (Sample){pair[0], {.ull_ = pair[1]}};
            at += strcspn(at, ",");
            if (*at) at++;
        }
    free(text);
    *count = used;
    return used ? SUCCESS : NOT_FOUND;
}

/* ------------------------------------------------------------------ processes */

typedef struct { unsigned pid; ull memory; unsigned gi, ci; } Process;
typedef struct { unsigned pid; ull memory; } Process1;

/* `pid:memory[:gi:ci],...` under the name without version; an empty value is an empty list. */
static int processes(const char *call, const char *key, Device *device, unsigned *count, char *out,
                     int old) {
    int code = enter(call, device);
    if (code) return code;
    char scope[64];
    scope_of(device, scope, sizeof scope);
    char *text = get("%s%s", scope, key);
    code = refusal(text);
    if (code) {
        free(text);
        return code;
    }
    unsigned used = 0, most = *count;
    for (char *at = text; *at;) {
        ull parts[4] = {0, 0, 0xFFFFFFFF, 0xFFFFFFFF};
        char one[128];
        snprintf(one, sizeof one, "%.*s", (int)strcspn(at, ","), at);
        numbers(one, parts, 4);
        if (used < most && old) ((Process1 *)out)[used] = (Process1){(unsigned)parts[0], parts[1]};
        else if (used < most)
            ((Process *)out)[used] = (Process){(unsigned)parts[0], parts[1], (unsigned)parts[2], (unsigned)parts[3]};
        used++;
        at += strcspn(at, ",");
        if (*at) at++;
    }
    free(text);
    *count = used;
    return used > most ? INSUFFICIENT_SIZE : SUCCESS;
}

#define PROCESSES(function, version, old)                                                      \
    int function##version(Device *device, unsigned *count, void *out) {                         \
        return processes(#function #version, #function, device, count, out, old);               \
    }
PROCESSES(nvmlDeviceGetComputeRunningProcesses, , 1)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, , 1)
#ifndef OLD_DRIVER
PROCESSES(nvmlDeviceGetComputeRunningProcesses, _v2, 0)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, _v2, 0)
PROCESSES(nvmlDeviceGetComputeRunningProcesses, _v3, 0)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, _v3, 0)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses, _v3, 0)
#endif

typedef struct { unsigned pid; ull timestamp; unsigned sm, memory, encoder, decoder; } Use;

/* `pid:ts:sm:memory:encoder:decoder,...`; a ts of 0 stands for now. */
static unsigned uses(const char *text, ull last, Use *out, unsigned most) {
    unsigned used = 0;
    for (const char *at = text; *at;) {
        ull parts[6] = {0};
        char one[160];
        snprintf(one, sizeof one, "%.*s", (int)strcspn(at, ","), at);
        numbers(one, parts, 6);
        if (!parts[1]) parts[1] = now_us();
        if (parts[1] > last) {
            if (used < most)
                out[used] = (Use){(unsigned)parts[0], parts[1], (unsigned)parts[2],
                                  (unsigned)parts[3], (unsigned)parts[4], (unsigned)parts[5]};
            used++;
        }
        at += strcspn(at, ",");
        if (*at) at++;
    }
    return used;
}

int nvmlDeviceGetProcessUtilization(Device *device, Use *out, unsigned *count, ull last) {
    ENTER(device);
    VALUE(text, device, "");
    unsigned used = uses(text, last, out, out ? *count : 0);
    free(text);
    if (!out || used > *count) {
        *count = used > 100 ? used : 100; /* as real drivers say, also of an idle card */
        return INSUFFICIENT_SIZE;
    }
    *count = used;
    return used ? SUCCESS : NOT_FOUND;
}

#ifndef OLD_DRIVER
typedef struct { ull timestamp; unsigned pid, sm, memory, encoder, decoder, jpeg, ofa; } UseInfo;
typedef struct { unsigned version, count; ull last; UseInfo *entries; } UseInfos;

int nvmlDeviceGetProcessesUtilizationInfo(Device *device, UseInfos *infos) {
    ENTER(device);
    if (infos->version != 0x01000018) return VERSION_MISMATCH;
    VALUE(text, device, "");
    Use found[256];
    unsigned used = uses(text, infos->last, found, 256);
    free(text);
    if (!infos->entries || used > infos->count) {
        infos->count = used > 100 ? used : 100;
        return INSUFFICIENT_SIZE;
    }
    for (unsigned i = 0; i < used; i++)
        infos->entries[i] = (UseInfo){found[i].timestamp, found[i].pid, found[i].sm, found[i].memory,
                                      found[i].encoder, found[i].decoder, 0, 0};
    infos->count = used;
    return used ? SUCCESS : NOT_FOUND;
}
#endif

/* ------------------------------------------------------------------ MIG */

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **out) {
    ENTER(device);
    if (index >= MAX_MIG) return INVALID_ARGUMENT;
    char *uuid = get("%d.mig.%u.nvmlDeviceGetUUID", device->card, index);
    if (!uuid) return NOT_FOUND;
    free(uuid);
    *out = &slices[device->card][index];
    return SUCCESS;
}

typedef struct { unsigned parts[8]; ull memory_mib; } Attributes;

/* multiprocessors,copy,decoder,encoder,jpeg,ofa,GPU instance slices,compute slices,memory MiB */
int nvmlDeviceGetAttributes_v2(Device *device, Attributes *out) {
    ENTER(device);
    VALUE(text, device, "");
    ull parts[9] = {0};
    numbers(text, parts, 9);
    for (int i = 0; i < 8; i++) out->parts[i] = (unsigned)parts[i];
    out->memory_mib = parts[8];
    free(text);
    return SUCCESS;
}

typedef struct { Device *device; unsigned id, profile, start, size; } InstanceInfo;

int nvmlDeviceGetGpuInstanceById(Device *device, unsigned id, Device **out) {
    ENTER(device);
    char *placement = get("%d.instance.%u", device->card, id);
    int code = placement ? refusal(placement) : 4; /* it needs a right that few have */
    free(placement);
    if (!code) *out = &instances[device->card][id & 255];
    return code;
}

int nvmlGpuInstanceGetInfo(Device *instance, InstanceInfo *out) {
    ENTER(NULL);
    char *placement = get("%d.instance.%d", instance->card, instance->mig);
    if (!placement) return NOT_FOUND;
    ull parts[2] = {0, 0};
    numbers(placement, parts, 2);
    free(placement);
    *out = (InstanceInfo){&cards[instance->card], (unsigned)instance->mig, 0, (unsigned)parts[0], (unsigned)parts[1]};
    return SUCCESS;
}

/* ------------------------------------------------------------------ GPM */

#ifndef OLD_DRIVER
typedef struct { int card, instance; double taken; } GpmSample;
typedef struct {
    unsigned id, code;
    double value;
    const char *short_name, *long_name, *unit;
} GpmMetric;
typedef struct { unsigned version, count; GpmSample *first, *second; GpmMetric metrics[]; } GpmMetrics;
typedef struct { unsigned version, supported; } GpmSupport;

int nvmlGpmQueryDeviceSupport(Device *device, GpmSupport *out) {
    ENTER(device);
    VALUE(text, device, "");
    out->supported = (unsigned)number_of(text);
    free(text);
    return SUCCESS;
}

int nvmlGpmSampleAlloc(GpmSample **out) {
    ENTER(NULL);
    *out = calloc(1, sizeof **out);
    return SUCCESS;
}

int nvmlGpmSampleFree(GpmSample *sample) {
    ENTER(NULL);
    free(sample);
    return SUCCESS;
}

int nvmlGpmSampleGet(Device *device, GpmSample *sample) {
    ENTER(device);
    *sample = (GpmSample){device->card, -1, seconds()};
    return SUCCESS;
}

int nvmlGpmMigSampleGet(Device *device, unsigned instance, GpmSample *sample) {
    ENTER(device);
    *sample = (GpmSample){device->card, (int)instance, seconds()};
    return SUCCESS;
}

/* `<card>.gpm.<metric>` and `<card>.gpm.<instance>.<metric>` hold the number. */
int nvmlGpmMetricsGet(GpmMetrics *out) {
    ENTER(NULL);
    GpmSample *first = out->first, *second = out->second;
    if (out->version != 1) return VERSION_MISMATCH;
    if (!first || !second || first->card != second->card || first->instance != second->instance)
        return INVALID_ARGUMENT;
    if (second->taken - first->taken < 0.1) return NO_DATA;
    for (unsigned i = 0; i < out->count; i++) {
        GpmMetric *metric = &out->metrics[i];
        char *text = first->instance < 0
                         ? get("%d.gpm.%u", first->card, metric->id)
                         : get("%d.gpm.%d.%u", first->card, first->instance, metric->id);
        metric->code = refusal(text);
        metric->value = metric->code ? 1e300 : atof(text);
        free(text);
    }
    return SUCCESS;
}
#endif

/* ------------------------------------------------------------------ events */

typedef struct { ull registered; long seen; } EventSet;
typedef struct { Device *device; ull type, data; unsigned gi, ci; } EventData;

/* The newest event of the file: `event.<n>=<card>:<xid>[:<gi>:<ci>]`, n from 1 without gaps. */
static long newest_event(void) {
    for (long n = 1;; n++) {
        char *text = get("event.%ld", n);
        if (!text) return n - 1;
        free(text);
    }
}

int nvmlEventSetCreate(EventSet **out) {
    ENTER(NULL);
    *out = calloc(1, sizeof **out);
    (*out)->seen = newest_event();
    return SUCCESS;
}

int nvmlEventSetFree(EventSet *set) {
    ENTER(NULL);
    free(set);
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(Device *device, ull types, EventSet *set) {
    ENTER(device);
    if (!(types & 8)) return INVALID_ARGUMENT;
    char *text = get("%d.noevents", device->card);
    if (text) {
        free(text);
        return NOT_SUPPORTED;
    }
    __atomic_or_fetch(&set->registered, 1ULL << device->card, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

int nvmlEventSetWait_v2(EventSet *set, EventData *out, unsigned milliseconds) {
    double end = seconds() + milliseconds / 1e3;
    ENTER(NULL);
    for (;;) {
        int code = faults(__func__, NULL);
        if (code) return code;
        char *text = get("event.%ld", set->seen + 1);
        if (text) {
            set->seen++;
            ull parts[4] = {0, 0, 0xFFFFFFFF, 0xFFFFFFFF};
            numbers(text, parts, 4);
            free(text);
            if (parts[0] >= MAX_CARDS || !(set->registered >> parts[0] & 1)) continue;
            *out = (EventData){&cards[parts[0]], 8, parts[1], (unsigned)parts[2], (unsigned)parts[3]};
            return SUCCESS;
        }
        if (seconds() >= end) return TIMEOUT;
        usleep(50000);
    }
}
