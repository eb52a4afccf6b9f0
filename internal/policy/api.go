package policy

import (
	"fmt"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// userAgent is how Virgate calls itself in the API server's logs and metrics.
const userAgent = "virgate"

// APIConfig says how the API server is reached: by the kubeconfig file at path,
// or, where path is empty, as a pod does. It connects to nothing.
func APIConfig(path string) (*rest.Config, error) {
	var config *rest.Config
	var err error
	if path == "" {
		config, err = rest.InClusterConfig()
	} else {
		config, err = clientcmd.BuildConfigFromFlags("", path)
	}
	if err != nil {
		return nil, fmt.Errorf("find the API server: %w", err)
	}
	config.UserAgent = userAgent
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return bounded{next} })
	return config, nil
}

// API is the way to the API server. What is read through one API shares one
// connection, and shares it with whatever else has a config of APIConfig with the
// same path.
type API struct {
	// core reads objects, whole or their metadata alone, as protobuf.
	core rest.Interface
}

// NewAPI makes an API; it connects to nothing yet.
func NewAPI(config *rest.Config) (*API, error) {
	config = rest.CopyConfig(config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return newOneConnection(next) })
	config.QPS = -1 // A feed limits itself.
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		return nil, fmt.Errorf("reach the API server: %w", err)
	}
	metav1.AddToGroupVersion(scheme, metav1.SchemeGroupVersion)
	if err := metav1.AddMetaToScheme(scheme); err != nil {
		return nil, fmt.Errorf("reach the API server: %w", err)
	}
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	config.APIPath, config.GroupVersion = "/api", &corev1.SchemeGroupVersion
	core, err := rest.RESTClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("reach the API server: %w", err)
	}
	return &API{core: core}, nil
}
