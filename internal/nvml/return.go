package nvml

import "strconv"

// Return is NVML's return code (nvml.h, nvmlReturn_t). It is an error so that
// errors.Is(err, nvml.GPUIsLost) works on an *Error.
type Return int

// The return codes that NVML documents; Success is never in an error.
const (
	Success               Return = 0
	Uninitialized         Return = 1
	InvalidArgument       Return = 2
	NotSupported          Return = 3
	NoPermission          Return = 4
	NotFound              Return = 6
	InsufficientSize      Return = 7
	DriverNotLoaded       Return = 9
	Timeout               Return = 10
	IRQIssue              Return = 11
	LibraryNotFound       Return = 12
	FunctionNotFound      Return = 13
	CorruptedInforom      Return = 14
	GPUIsLost             Return = 15
	ResetRequired         Return = 16
	OperatingSystem       Return = 17
	LibRMVersionMismatch  Return = 18
	InUse                 Return = 19
	Memory                Return = 20
	NoData                Return = 21
	InsufficientResources Return = 23
	NotReady              Return = 27
	GPUNotFound           Return = 28
	InvalidState          Return = 29
	Unknown               Return = 999
)

var returnNames = map[Return]string{
	Success:               "SUCCESS",
	Uninitialized:         "UNINITIALIZED",
	InvalidArgument:       "INVALID_ARGUMENT",
	NotSupported:          "NOT_SUPPORTED",
	NoPermission:          "NO_PERMISSION",
	NotFound:              "NOT_FOUND",
	InsufficientSize:      "INSUFFICIENT_SIZE",
	DriverNotLoaded:       "DRIVER_NOT_LOADED",
	Timeout:               "TIMEOUT",
	IRQIssue:              "IRQ_ISSUE",
	LibraryNotFound:       "LIBRARY_NOT_FOUND",
	FunctionNotFound:      "FUNCTION_NOT_FOUND",
	CorruptedInforom:      "CORRUPTED_INFOROM",
	GPUIsLost:             "GPU_IS_LOST",
	ResetRequired:         "RESET_REQUIRED",
	OperatingSystem:       "OPERATING_SYSTEM",
	LibRMVersionMismatch:  "LIB_RM_VERSION_MISMATCH",
	InUse:                 "IN_USE",
	Memory:                "MEMORY",
	NoData:                "NO_DATA",
	InsufficientResources: "INSUFFICIENT_RESOURCES",
	NotReady:              "NOT_READY",
	GPUNotFound:           "GPU_NOT_FOUND",
	InvalidState:          "INVALID_STATE",
	Unknown:               "UNKNOWN",
}

// String is NVML's name of the code without its "NVML_ERROR_" prefix.
func (r Return) String() string {
	if name, ok := returnNames[r]; ok {
		return name
	}
	return "ERROR_" + strconv.Itoa(int(r))
}

func (r Return) Error() string { return r.String() }

// ParseReturn is the return code of that name, as String writes it; false when
// there is none.
func ParseReturn(name string) (Return, bool) {
	for code, known := range returnNames {
		if known == name {
			return code, true
		}
	}
	return Unknown, false
}
