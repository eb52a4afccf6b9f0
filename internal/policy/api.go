package policy

import (
	"fmt"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/metadata"
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
// connection.
type API struct {
	// core reads whole objects, metadata their metadata alone; both as protobuf.
	core     rest.Interface
	metadata metadata.Interface
}

// NewAPI makes an API; it connects to nothing yet.
func NewAPI(config *rest.Config) (*API, error) {
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("reach the API server: %w", err)
	}
	return newAPI(config, client)
}

func newAPI(config *rest.Config, client *http.Client) (*API, error) {
	config = rest.CopyConfig(config)
	config.QPS = -1 // A feed limits itself.
	objects, err := metadata.NewForConfigAndClient(config, client)
	if err != nil {
		return nil, fmt.Errorf("reach the API server: %w", err)
	}
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		return nil, fmt.Errorf("reach the API server: %w", err)
	}
	metav1.AddToGroupVersion(scheme, metav1.SchemeGroupVersion)
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	config.APIPath, config.GroupVersion = "/api", &corev1.SchemeGroupVersion
	core, err := rest.RESTClientForConfigAndClient(config, client)
	if err != nil {
		return nil, fmt.Errorf("reach the API server: %w", err)
	}
	return &API{core: core, metadata: objects}, nil
}
