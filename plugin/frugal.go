package plugin

import (
	"errors"

	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
)

const (
	// mostItems is how many devices, containers and other fields one request may
	// have. The longest list that a profile may make has some 60,000 devices, and a
	// request may name each twice.
	mostItems = 1 << 17
	// uncounted is the size in bytes up to which a request is not counted: it
	// cannot have many.
	uncounted = 64 << 10
)

// errTooMany refuses a request without making anything of it.
var errTooMany = errors.New("the request has more fields than any list has devices")

// frugal is the codec of the server. A message of two bytes a field takes some
// fifty times its size when it is decoded; gRPC bounds the size alone.
type frugal struct{ encoding.CodecV2 }

func newFrugal() frugal { return frugal{encoding.GetCodecV2(proto.Name)} }

// Unmarshal implements encoding.CodecV2.
func (f frugal) Unmarshal(data mem.BufferSlice, v any) error {
	if data.Len() <= uncounted {
		return f.CodecV2.Unmarshal(data, v)
	}
	whole := data.MaterializeToBuffer(mem.DefaultBufferPool())
	defer whole.Free()
	if items(whole.ReadOnlyData(), mostItems) > mostItems {
		return errTooMany
	}
	return f.CodecV2.Unmarshal(mem.BufferSlice{whole}, v)
}

// items counts the fields of a message and of the messages in it, one level deep
// as the requests of the API are, and stops after most.
func items(data []byte, most int) int {
	count := 0
	for len(data) > 0 && count <= most {
		_, kind, n := protowire.ConsumeTag(data)
		if n < 0 {
			return count // What is no message is refused by whoever decodes it.
		}
		data = data[n:]
		if n = protowire.ConsumeFieldValue(1, kind, data); n < 0 {
			return count
		}
		count++
		if inner, length := protowire.ConsumeBytes(data[:n]); kind == protowire.BytesType && length > 0 {
			for len(inner) > 0 && count <= most {
				_, _, size := protowire.ConsumeField(inner)
				if size < 0 {
					break
				}
				inner = inner[size:]
				count++
			}
		}
		data = data[n:]
	}
	return count
}
